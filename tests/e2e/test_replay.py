"""What real servers wrote down of their machines is what the machines say again: ``pushkv replay``."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster import Cluster
from .dispatch import Client, for_decode, fresh, words
from .faults import BOUND_S, Fault, abort, bounded, faulty_pair, started
from .servers import start_all

pytestmark = pytest.mark.usefixtures("only_pushkv")


async def test_the_traces_of_two_servers_can_be_played_again(cluster: Cluster, path: str, folder: Path) -> None:
    """Hand-overs, a broken write, a leg that is given up, a server that is killed at work, and two that end well."""
    cluster.drop()
    for old in folder.glob("[PD].trace.jsonl*"):
        old.unlink()
    pair = await faulty_pair(cluster, path)
    fault = Fault(pair.prefill)
    async with Client() as client:
        for length in (33, 700):
            assert (await client.push(pair.prefill, pair.decode, words(length, length), 6)).decode.ok
        fault.set("error")
        got = await bounded(client.push(pair.prefill, pair.decode, words(300, 86), 6), BOUND_S, "D")
        fault.clear()
        assert not got.decode.ok
        tid = fresh()
        leg = client.complete(pair.decode, words(200, 87), 6, for_decode(pair.prefill, tid), request_id=tid)
        async with started(leg, client.push(pair.prefill, pair.decode, words(700, 88), 6)) as tasks:
            await asyncio.sleep(0.5)
            await abort(tasks[0])
            pair.prefill.kill()
            await bounded(tasks[1], BOUND_S, "D")
    await asyncio.to_thread(start_all, pair.prefill)
    await pair.recovered(limit_s=BOUND_S)
    for server in pair.servers:
        await asyncio.to_thread(server.stop)
        said = await asyncio.to_thread(replayed, folder / f"{server.name}.trace.jsonl")
        assert said.endswith(" verdicts, the machines say the same\n") and int(said.split()[0]) >= 5, said


def replayed(trace: Path) -> str:
    """What the command line says of a trace."""
    command = [sys.executable, "-m", "pushkv.sim.cli", "replay", str(trace)]
    return subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
