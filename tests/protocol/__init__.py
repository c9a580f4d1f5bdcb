"""The protocol is explored in a world of adversaries (``world``), and its rules are tested one by one."""
