"""What the layout code refuses, as exceptions.

Every one of them means: no plan was made, nothing may be written. All are `LayoutError`, so that a host can turn any
of them into one failed request (or one refused peer) and live on.
"""

from __future__ import annotations


class LayoutError(ValueError):
    """A layout, a pair of layouts, a block list or a token range that cannot be served. The message names the
    culprit.
    """


class PairingError(LayoutError):
    """Two engines whose caches cannot be mapped on each other; raised at the handshake, with both layouts in the
    message.
    """


class BlockError(LayoutError):
    """A block list that is out of range, repeats a block, is too long for its pool or too short for the tokens."""


class RangeError(LayoutError):
    """A token range that one side does not hold, e.g. P has fewer tokens than D asks for."""


class TooManySpans(LayoutError):
    """The plan has more spans than the caller allows to hold in memory at once; the packed path has far fewer."""
