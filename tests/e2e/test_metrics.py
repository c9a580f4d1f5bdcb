"""What a hand-over was is in the metrics of both servers, although nothing happens there afterwards, and so is what is
held meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from .cluster import Cluster, Pair
from .dispatch import Client, for_decode, for_prefill, fresh, words
from .faults import BOUND_S, LEASE_S, PATIENT, Fault, abort, faulty_pair, started
from .kinds import Knobs
from .servers import Server, until

pytestmark = pytest.mark.usefixtures("only_pushkv")

PREFILL = {"transfers_sent_total", "bytes_sent_total", "descriptors_total", "post_seconds_count", "wire_seconds_count"}
DECODE = {"transfers_received_total", "path_total"}
PACKED = {"prefill": {"gather_seconds_count", "handover_seconds_count"}, "decode": {"scatter_seconds_count"}}
SOON_S = 15.0


async def test_a_hand_over_is_in_the_metrics_of_idle_servers(cluster: Cluster, path: str) -> None:
    pair: Pair = cluster.pair(Knobs(path=path))
    before = [server.metrics() for server in pair.servers]
    await pair.right()
    packed = path == "packed"
    wanted = (PREFILL | (PACKED["prefill"] if packed else set()), DECODE | (PACKED["decode"] if packed else set()))
    for server, old, names in zip(pair.servers, before, wanted, strict=True):
        until(lambda s=server, o=old, n=names: not _missing(s, o, n), SOON_S)
        missing = _missing(server, old, names)
        assert not missing, f"{server.name} does not tell {missing}"


def _missing(server: Server, old: dict[str, float], names: set[str]) -> list[str]:
    """The series that have not grown."""
    found = server.metrics()
    return sorted(n for n in names if found.get(f"pushkv:{n}", 0.0) <= old.get(f"pushkv:{n}", 0.0))


async def test_what_is_held_is_in_the_metrics_for_as_long_as_it_is(cluster: Cluster, path: str) -> None:
    """A write that stands still, a request that is given up meanwhile, and a prompt that nobody fetches."""
    pair = await faulty_pair(cluster, path, PATIENT | {"lease_s": LEASE_S})
    p, d, fault, tid = pair.prefill, pair.decode, Fault(pair.prefill), fresh()
    direct = path == "direct"
    on_p = {"writes_open"} if direct else {"writes_open", "staging_bytes_used"}
    fault.set("hold")
    async with (
        Client() as client,
        started(client.complete(d, words(300, 91), 6, for_decode(p, tid), request_id=tid)) as tasks,
    ):
        assert (await client.complete(p, words(300, 91), 1, for_prefill(tid), request_id=tid)).ok
        await shown(p, on_p)
        await shown(d, {"open_incoming"} if direct else {"open_incoming", "landing_segments_used"})
        await abort(tasks[0])
        await shown(d, {"quarantined"})
        fault.clear()
        await asyncio.to_thread(pair.emptied, limit_s=BOUND_S)
        await gone(p, on_p | {"open_outgoing"})
        await gone(d, {"open_incoming", "landing_segments_used", "quarantined"})
        assert (await client.complete(p, words(200, 92), 1, for_prefill(fresh()))).ok
        await shown(p, {"leases"})
        await asyncio.sleep(LEASE_S)
        await gone(p, {"leases", "open_outgoing"})
    assert p.counted("pushkv:transfers_failed_total").get("lease") == 1
    await pair.recovered()


async def shown(server: Server, names: set[str]) -> None:
    """The gauges are above zero, soon."""
    await asyncio.to_thread(until, lambda: not _zero(server, names), SOON_S)
    zero = _zero(server, names)
    assert not zero, f"{server.name} does not tell {zero}"


async def gone(server: Server, names: set[str]) -> None:
    """The gauges are zero, soon."""
    await asyncio.to_thread(until, lambda: _zero(server, names) == names, SOON_S)
    left = names - _zero(server, names)
    assert not left, f"{server.name} goes on telling {left}"


def _zero(server: Server, names: set[str]) -> set[str]:
    found = server.metrics()
    return {name for name in names if not found.get(f"pushkv:{name}", 0.0)}
