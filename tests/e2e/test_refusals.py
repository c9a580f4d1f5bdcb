"""A real server with a setting that cannot be does not start, and its log says which one it was and what would do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .cluster import Cluster
from .kinds import Knobs
from .servers import Server, ServerDied, start_all

pytestmark = pytest.mark.usefixtures("only_pushkv")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prot": 1}, "kv_connector_extra_config['prot'] is not a setting of pushkv; did you mean 'port'?"),
        ({"port": 0}, "kv_connector_extra_config['port'] is 0: it must be a port from 1 to 65535."),
        ({"host": "0.0.0.0"}, "kv_connector_extra_config['host'] is '0.0.0.0': it must be the one address"),
        ({"host": "10.0.0.1"}, "host is '10.0.0.1' and secret is not set"),
        ({"secret": "short"}, "kv_connector_extra_config['secret'] is (hidden): it must have at least 16 characters"),
        ({"backend": "TCP"}, "kv_connector_extra_config['backend'] is 'TCP': it must be one of UCX, LIBFABRIC."),
        ({"path": "zigzag"}, "kv_connector_extra_config['path'] is 'zigzag': it must be one of auto, packed, direct."),
        ({"landing_bytes": "many"}, "kv_connector_extra_config['landing_bytes'] is 'many': it must be bytes"),
        ({"landing_bytes": 4096}, "landing_bytes is 4096: it must hold at least one segment"),
        ({"landing_bytes": "9000GiB"}, "landing_bytes need 9000.00 GiB, but"),
        ({"segment_bytes": 5000}, "segment_bytes is 5000: it must be a multiple of 4096."),
        ({"lease_s": 0}, "kv_connector_extra_config['lease_s'] is 0: it must be a positive number of seconds."),
        ({"landing_share": 2}, "kv_connector_extra_config['landing_share'] is 2: it must be a part of a whole"),
        ({"dead_peer_s": 0.1}, "dead_peer_s"),
    ],
)
async def test_a_bad_setting_stops_the_start_with_a_sentence(
    cluster: Cluster, settings: dict[str, Any], says: str
) -> None:
    cluster.drop()
    server = Server(cluster.kind.spec("D", cluster.model, cluster.folder, Knobs(more=settings)))
    with pytest.raises(ServerDied, match="ended while starting"):
        await asyncio.to_thread(start_all, server)
    log = server.log.read_text(encoding="utf-8", errors="replace")
    sentences = [line for line in log.splitlines() if "SettingsError: " in line]
    assert any(says in line for line in sentences), sentences or server.tail()
