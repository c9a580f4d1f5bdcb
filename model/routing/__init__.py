"""Which P and which D a request goes to. Shared by the router and the simulator; reads no clock, asks no server."""

from pushkv.model.routing.dispatch import LeastTokens, RoundRobin

__all__ = ["LeastTokens", "RoundRobin"]
