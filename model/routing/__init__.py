"""Which P and which D a request goes to. Shared by the router and the simulator; reads no clock, asks no server."""

from pushkv.model.routing.affinity import PrefixAffinity, SessionAffinity
from pushkv.model.routing.dispatch import Dispatcher, LeastTokens, RoundRobin

POLICIES: dict[str, type[Dispatcher]] = {
    "round-robin": RoundRobin,
    "least-tokens": LeastTokens,
    "session": SessionAffinity,
    "prefix": PrefixAffinity,
}
"""By the names that settings use."""

__all__ = ["POLICIES", "Dispatcher", "LeastTokens", "PrefixAffinity", "RoundRobin", "SessionAffinity"]
