"""Trials that no profile plays: the same seed with and without something (I6, I7), a forger, damaged frames, churn."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from pushkv.model.protocol import MessageError, decode, encode
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.explore.profiles import CALM, Config, Driver
from pushkv.sim.explore.violation import Violation
from pushkv.sim.explore.world import SETTINGS, World
from tests.protocol.transcripts import ONE, STEADY, tell

MODES = ("packed", "early", "late", "pull")


def _told(world: World, engine: str, tids: list[str]) -> list[tuple[float, str, int]]:
    """What the host of ``engine`` was told of ``tids``, by their place in the list."""
    history = world.processes[engine].host.history
    return [(round(at, 6), type(a).__name__, tids.index(a.transfer_id)) for at, a in history if a.transfer_id in tids]  # type: ignore[attr-defined]


def isolation(seed: int) -> None:
    """I6: D is told the same of P0's transfers, at the same times, whether P1 can be reached or asked at all."""

    def played(other: bool) -> Any:
        dice = Random(seed)
        world = World(1, replace(STEADY, blocks=128), Config({"P0": 1, "P1": 1}, {"D": 1}))
        world.cut("P1", "D")
        tids = []
        for _ in range(5):
            mode, late, stalled = dice.choice(MODES), dice.random(), dice.choice(("early", "late"))
            if other:
                world.request(stalled, "P1", "D", 8, 8)
            tids.append(world.request(mode, "P0", "D", 8, 8, delays=(late, late)).tid)
            world.run(dice.random())
        world.run(20.0)
        return _told(world, "D", tids)

    alone, beside = played(False), played(True)
    if alone != beside:
        raise Violation(f"I6: beside a peer that is out of reach D is told {beside}, else {alone}")


def retry(seed: int) -> None:
    """I7: an attempt goes as it would have gone without the one before it, which was aborted in flight."""

    def played(earlier: bool) -> Any:
        dice = Random(seed)
        world = World(1, replace(STEADY, blocks=128), ONE)
        world.request("packed", "P", "D", 4, 4)
        world.run(8.0)
        first, again = dice.choice(("early", "late")), dice.choice(("early", "late"))
        moment = 0.25 + dice.random()
        if earlier:
            world.fabric.fates.append((5.0, False))
            request = world.request(first, "P", "D", 8, 8)
            world.run(moment)
            world.abort(request, "D")
        else:
            world.run(moment)
        world.run(0.1)
        tids = [world.request(again, "P", "D", 8, 8).tid]
        world.run(20.0)
        return _told(world, "D", tids)

    alone, after = played(False), played(True)
    if alone != after:
        raise Violation(f"I7: after an aborted attempt D is told {after}, else {alone}")


def wrong_engine(seed: int) -> None:
    """I5a: whoever asks an engine that has no such prefill is answered within ``orphan_s`` and the way there."""
    world = World(seed, CALM, Config({"P": 1, "Q": 1}, {"D": 1}))
    requests = [world.request(mode, "P", "D", 8, 8, spoiled="sent to the wrong P") for mode in ("packed", "late")]
    for request in requests:
        request.asks = "Q"
    world.run(SETTINGS.orphan_s + 2.0)
    for request in requests:
        if not request.outcome:
            raise Violation(f"I5a: {request.tid} asked an engine that has no such prefill and is not answered")
    world.drain()


def own_pause(seed: int) -> None:
    """V1: no verdict falls for one's own sleep; messages of that time are lost, so that the inbox says nothing."""
    sleep = 4.0 + seed % 12
    world = World(seed, replace(STEADY, readable=False), ONE, replace(SETTINGS, orphan_s=60.0))
    request = world.request("late", "P", "D", 8, 8, delays=(sleep + 6.0, 0.0))
    world.run(2.0)
    world.cut("P", "D")
    world.pause("D")
    world.run(sleep)
    world.heal()
    world.wake("D")
    world.run(3.0)
    if request.outcome:
        raise Violation(f"V1: {request.outcome} after {sleep} s of D's own sleep")


def cold_link(seed: int) -> None:
    """I5c: of two senders one cannot be reached before the transfer has given way, and landed from the other."""
    tell("gave_way_before_its_handshake")


def one_rank_done(seed: int) -> None:
    """V1: what was preempted when one rank had written all of it gives way, and lands."""
    if "Fail t2" in tell("preempted_when_one_rank_was_done"):
        raise Violation("V1: t2 has failed, and no more was done to it than a preemption")


def churn(seed: int) -> None:
    """V3: engines come, hand over one prompt and are not heard of again; the tables stay."""
    engines = {f"D{number}": 1 for number in range(12)}
    settings = replace(SETTINGS, links=4)
    world = World(seed, CALM, Config({"P": 1}, dict(engines)), settings)
    for engine in engines:
        request = world.request("packed", "P", engine, 8, 8)
        world.run(4.0)
        if request.outcome != "loaded":
            raise Violation(f"V1: {request} failed and nothing was done to it")
        endpoint = world.processes["P"].endpoints[0]
        for table in (endpoint.peers, endpoint.sender._links, endpoint.receiver._links):
            if len(table) > settings.links:
                raise Violation(f"V3: {len(table)} links for {settings.links} and one open")


def forged(seed: int) -> None:
    """I3 beside a forger who knows the incarnations and says ``Written`` of what was offered and has no memory yet. (Of
    what has some the writer's word is all that there is.)
    """
    world = World(seed, CALM)
    send = world.network.send

    def with_forgeries(source: Any, target: Any, message: Any) -> None:
        send(source, target, message)
        process = world.processes[target[0]]
        if isinstance(message, msg.Offer) and not process._inbox[target[1]]:
            shard = process.endpoints[target[1]].receiver._open(source, message.attempt)
            if shard is None or shard.transfer.memory is not None:
                return
            said = msg.Written(message.src, message.dst, message.attempt, 0, message.tokens, True)
            process.receive(target[1], ev.Received(source, decode(encode(said))))

    world.network.send = with_forgeries  # type: ignore[method-assign]
    Driver(world).play()


class Anything(int):
    """Equal to every number."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def frames(seed: int) -> None:
    """F27: a frame is refused when it is of another version, cut short, longer than allowed or of an unknown kind."""
    good = bytes((1, 8)) + encode(msg.Cancelled(1, 2, 3 + seed))[2:]
    bad = {
        "version": [bytes((version, *good[1:])) for version in (0, 2, 255)],
        "truncated": [b"", good[:1]],
        "unknown": [bytes((1, kind)) + good[2:] for kind in (len(msg.KINDS), 255)],
        "malformed": [good[:-1], good + b"\x01", bytes((1, 0)) + good[2:4]],
        "oversized": [good + bytes(1 << 20)],
    }
    for kind, refused in bad.items():
        for frame in refused:
            try:
                found: Any = decode(frame)
            except MessageError as error:
                found = error
            if not isinstance(found, MessageError) or found.kind != kind:
                raise Violation(f"F27: a frame that is {kind} is read as {found}")
