"""What is raised when a property does not hold. A module of its own: mypyc compiles no class that is an exception."""

from __future__ import annotations


class Violation(AssertionError):
    """A property of the design does not hold."""
