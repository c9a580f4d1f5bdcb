"""Exploration: the machines of ``model/protocol`` in a world that means them harm, checked against ghost state.

``world`` holds engines (``process``, ``host``), the network and the adversarial memory (``fabric``); ``ghost`` knows
what is true and raises ``Violation``; ``profiles`` says how unkind a world is and plays one seed.

``exhaustive`` leaves nothing to chance: every interleaving of small worlds (``worlds``, ``scope``), in which the same
machines (``rank``, ``books``) make all ``moves`` that there are.
"""
