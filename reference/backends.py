"""NIXL's backends: how to start an agent, and what its words are worth.

Decides which backends are known, how each is configured, and whether its completion is an arrival. Does not move
bytes (`transport` does). NIXL is imported when an agent is made, not before.

UCX. DONE means that the bytes are in the target's memory: after the puts NIXL waits for `ucp_ep_flush_nbx`, which
"completes at the origin and at the target" (UCP's API documentation). TCP_CONN_NB: by default UCX over TCP connects
while a peer is loaded, and waits there for seconds (nobody answers) or minutes (packets are dropped); with it the
waiting is part of the first write.

LIBFABRIC. DONE is a local completion without FI_DELIVERY_COMPLETE; libfabric's fi_cq(3) leaves the state at the peer
undefined. The target learns of the arrival from NIXL's notice, which it delivers once it has counted all stores of that
call (`landing`). What is given up has no such notice: `settling` waits. Errors come from a queue that all writes share,
and go to whoever asks next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BACKENDS", "Backend", "TransportError", "attempt", "make_agent", "words"]


class TransportError(Exception):
    """NIXL refused, or is not there. Nothing was handed over."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What we know about a NIXL backend.

    arrival: "completion" if DONE means that the target has the bytes, else "notification". drain_s: how long a broken
    write may go on storing. owned_errors: whether an error is reported to the write that it belongs to.
    """

    name: str
    arrival: str
    drain_s: float
    owned_errors: bool
    parameters: Mapping[str, str]


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("UCX", "completion", 1.0, True, {"engine_config": "TCP_CONN_NB=y"}),
        Backend("LIBFABRIC", "notification", 30.0, False, {}),
    )
}
"""By NIXL's name. The drain times are assumed: far above what tearing a connection down takes."""


def make_agent(name: str, backend: Backend) -> Any:
    """A NIXL agent without threads of its own that two threads may call. Raises `TransportError`."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as error:
        raise TransportError(f"NIXL is not installed ({error}); pip install nixl") from error
    settings = nixl_agent_config(
        enable_prog_thread=False, backends=[], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    agent = attempt("starting NIXL", nixl_agent, name, settings)
    attempt(f"starting NIXL's backend {backend.name}", agent.create_backend, backend.name, dict(backend.parameters))
    return agent


def attempt(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """The call's result; whatever it raises becomes a `TransportError` that says `what` failed."""
    try:
        return call(*arguments)
    except Exception as error:
        raise TransportError(f"{what} failed: {words(error)}") from error


def words(error: object) -> str:
    """An error in a sentence."""
    return f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
