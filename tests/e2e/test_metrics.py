"""What a hand-over was is in the metrics of both servers, although nothing happens there afterwards."""

from __future__ import annotations

import pytest

from .cluster import Cluster, Pair
from .kinds import Knobs
from .servers import Server, until

pytestmark = pytest.mark.usefixtures("only_pushkv")

PREFILL = {"transfers_sent_total", "bytes_sent_total", "descriptors_total", "post_seconds_count", "wire_seconds_count"}
DECODE = {"transfers_received_total", "path_total"}
PACKED = {"prefill": {"gather_seconds_count", "handover_seconds_count"}, "decode": {"scatter_seconds_count"}}
SOON_S = 5.0


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
