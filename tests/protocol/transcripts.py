"""The protocol's main stories, played in a steady world and written down: ``tests/transcripts``, one file a story.

``python -m tests.protocol.transcripts --write`` renews the files; ``test_transcripts`` compares. Read the differences
before you commit them: they are what changes on the wire.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from textwrap import wrap
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.explore.profiles import Config, Profile
from pushkv.sim.explore.transcript import LEGEND, Transcript
from pushkv.sim.explore.world import SETTINGS, World

FOLDER = Path(__file__).parents[1] / "transcripts"
STEADY = Profile(
    "steady", readable=True, latency_s=0.005, jitter_s=0.0, inside_s=0.0, timer_late_s=0.0, connect_s=0.01, pack_s=0.01,
    post_s=0.002,
    wire_s=0.05, chunk_s=0.2, load_s=0.01, run_s=0.1, quiet_s=1.0, cuts=1,
)  # fmt: skip
ONE = Config({"P": 1}, {"D": 1})

Story = Callable[[World], None]
STORIES: dict[str, tuple[Story, dict[str, Any]]] = {}


def story(**world: Any) -> Callable[[Story], Story]:
    """Register a story; ``world`` overrides what it is played in."""

    def add(play: Story) -> Story:
        STORIES[play.__name__] = (play, world)
        return play

    return add


def tell(name: str) -> str:
    """The transcript of one story."""
    play, options = STORIES[name]
    profile = replace(STEADY, **options.get("profile", {}))
    settings = replace(SETTINGS, **{"staging_bytes": 1 << 16, **options.get("settings", {})})
    world = World(1, profile, options.get("config", ONE), settings)
    if not options.get("cold"):
        world.request("packed", next(iter(world.config.prefill)), next(iter(world.config.decode)), 4, 4)
        world.run(8.0)
    transcript = Transcript(world)
    play(world)
    world.log = None
    world.drain()
    title = name.replace("_", " ").capitalize()
    doc = "\n".join(wrap(" ".join((play.__doc__ or "").split()), 98))
    return f"{title}\n{'=' * len(title)}\n{doc}\n\n{LEGEND}\n" + "\n".join(transcript.lines) + "\n"


# ---------------------------------------------------------------- what goes well


@story(cold=True)
def packed_push(world: World) -> None:
    """Both legs at once, between engines that have never met: greeting, registration, offer, grant, one write."""
    world.request("packed", "P", "D", 8, 8)
    world.run(0.6)


@story()
def direct_early(world: World) -> None:
    """D allocates blocks before P has begun, as the AWS design does: they are registered with the request."""
    world.request("early", "P", "D", 8, 8)
    world.run(0.6)


@story()
def direct_late(world: World) -> None:
    """D allocates when P offers, so no block waits for a prefill."""
    world.request("late", "P", "D", 8, 8)
    world.run(0.6)


@story()
def pull(world: World) -> None:
    """The halves change places: P registers its blocks with D, D reads them."""
    world.request("pull", "P", "D", 8, 8)
    world.run(0.6)


@story()
def chunked_parts(world: World) -> None:
    """Each prefill chunk leaves when it is computed; the last part closes the count."""
    world.request("packed", "P", "D", 12, 12, chunked=True)
    world.run(1.0)


@story()
def prefix_hit(world: World) -> None:
    """D has the first eight of twelve tokens cached and wants the last four; then one of which it has all."""
    world.request("packed", "P", "D", 12, 4)
    world.run(0.6)
    world.request("packed", "P", "D", 8, 0)
    world.run(0.6)


# ---------------------------------------------------------------- aborts and leases


@story()
def abort_before_prefill(world: World) -> None:
    """F16: the client leaves D before P's leg has come. P refuses the prompt when it comes."""
    request = world.request("packed", "P", "D", 8, 8, delays=(0.3, 0.0))
    world.run(0.1)
    world.abort(request, "D")
    world.run(0.6)


@story()
def abort_in_flight(world: World) -> None:
    """F03: the client leaves D while the write flies. The verdict falls at once; the blocks come back when P says that
    nothing is active.
    """
    world.fabric.fates.append((1.0, False))
    request = world.request("early", "P", "D", 8, 8)
    world.run(0.4)
    world.abort(request, "D")
    world.run(1.5)


@story(settings={"lease_s": 2.0, "orphan_s": 2.0})
def lease_ends(world: World) -> None:
    """F14: D's leg never comes. P keeps its blocks to the end of the lease; who registers after that is answered at
    once.
    """
    world.request("early", "P", "D", 8, 8, delays=(0.0, 3.0))
    world.run(3.5)


@story(config=Config({"P": 1}, {"D": 2}))
def write_broken_with_sibling_active(world: World) -> None:
    """F05: P writes into two ranks of D. One write breaks; D is told when the other is quiet too, and frees then."""
    world.fabric.fates.extend([(0.05, True), (1.0, False)])
    world.request("late", "P", "D", 8, 8)
    world.run(2.0)


# ---------------------------------------------------------------- loss and death


@story()
def lost_written(world: World) -> None:
    """F19: the notice is lost. The next beat says what D has, and P says it again."""
    world.network.lose_next.append(lambda source, target, m: isinstance(m, msg.Written))
    world.request("packed", "P", "D", 8, 8)
    world.run(1.6)


@story(settings={"suspect_after_s": 2.5})
def prefill_killed(world: World) -> None:
    """F06: P is killed while it writes. Silence gives the verdict; its successor's answer and the drain time give the
    blocks back.
    """
    world.fabric.fates.append((1.0, False))
    world.request("early", "P", "D", 8, 8)
    world.run(0.3)
    world.kill("P")
    world.run(4.0)
    world.start("P")
    world.run(4.0)


@story()
def decode_restarted(world: World) -> None:
    """F07: D is killed after it registered and comes back with the same engine id. P writes nothing for the dead one,
    and frees.
    """
    world.request("early", "P", "D", 8, 8, delays=(0.5, 0.0))
    world.run(0.2)
    world.kill("D")
    world.start("D")
    world.request("packed", "P", "D", 4, 4)
    world.run(2.5)


# ---------------------------------------------------------------- giving way


@story()
def opposite_admissions_direct(world: World) -> None:
    """F17, rule 8: D's cache is t2's, whose prefill is slow; t3's is finished and waits. D takes t2's memory back."""
    decode, prefill = world.processes["D"].host, world.processes["P"].host
    del decode.free[:-4]
    decode.total = 4
    first = world.request("late", "P", "D", 16, 16)
    world.run(0.05)
    leg = prefill.sending[first.tid]
    leg.run += 1
    world.at(1.0, prefill._chunk, leg, leg.run)
    world.request("late", "P", "D", 12, 12)
    world.run(3.0)


@story(profile={"blocks": 4}, settings={"landing_segments": 4})
def opposite_admissions_packed(world: World) -> None:
    """F17, rule 8: D's landing memory is t2's, P's cache is t3's and full. P gives t2's grant back, and D grants t3."""
    first = world.request("packed", "P", "D", 16, 16, chunked=True)
    world.run(0.09)
    world.request("packed", "P", "D", 12, 12)
    prefill = world.processes["P"].host
    prefill.preempt(prefill.sending[first.tid])
    world.run(3.0)


@story(profile={"blocks": 4}, settings={"landing_segments": 4})
def preempted_and_gave_way(world: World) -> None:
    """F17, rule 8: t2 has sent a part when it is preempted, and P's cache is t3's, which is finished and waits for t2's
    landing memory. t2 gives it back when its write is quiet, and is sent anew when t3 has gone. (It once kept it until
    t3's lease ended.)
    """
    first = world.request("packed", "P", "D", 16, 16, chunked=True)
    prefill = world.processes["P"].host
    world.fabric.fates.append((0.6, False))
    while not world.fabric.writes:
        world.run(0.01)
    world.request("packed", "P", "D", 12, 12)
    prefill.preempt(prefill.sending[first.tid])
    world.run(4.0)


class Unhurried(Random):
    """For a prefill that computes its whole prompt and does not come to its first token."""

    def random(self) -> float:
        return 0.9


@story(profile={"blocks": 4, "chunk_s": 0.1}, settings={"landing_segments": 4}, config=Config({"P": 2}, {"D": 2}))
def preempted_when_one_rank_was_done(world: World) -> None:
    """Rule 8, with ranks: P/0 has written all of t2 when it is preempted, P/1 has no room yet for its last part. P/0
    has not told of its own, as t2 could be preempted: both give way to t3, and begin anew. (P/0 was over with t2 once,
    P/1 could not go on, and t2 failed.)
    """
    first = world.request("packed", "P", "D", 16, 16, chunked=True)
    host = world.processes["P"].host
    world.run(0.01)
    host.sending[first.tid].random = Unhurried()
    world.fabric.rooms.extend((0.0, 0.0, 0.0, 5.0))
    while host.sending[first.tid].computed < 16:
        world.run(0.01)
    world.run(0.1)
    world.request("packed", "P", "D", 12, 12)
    host.preempt(host.sending[first.tid])
    host.sending[first.tid].random = Random(1)
    world.run(4.0)


@story(config=Config({"P": 2, "Q": 1}, {"D": 1}), cold=True)
def gave_way_before_its_handshake(world: World) -> None:
    """Rule 8: t1 is to give way while P/0 writes it and P/1 was not reached yet. What has landed stays; P/1 is greeted
    again for the rest. (It was once registered where no link was, and known to nobody.)
    """
    world.network.lose_next.append(lambda source, target, m: isinstance(m, msg.Hello) and target == ("P", 1))
    host = world.processes["D"].host
    world.fabric.fates.append((1.2, False))
    world.request("early", "P", "D", 8, 8)
    world.run(0.1)
    held, host.free = host.free, []
    world.request("late", "Q", "D", 8, 8)
    world.run(1.0)
    host.free += held
    world.run(1.0)


# ---------------------------------------------------------------- who is not there, or not the one expected


@story(config=Config({"P": 1, "Q": 1}, {"D": 1}), settings={"orphan_s": 2.0})
def wrong_prefill_engine(world: World) -> None:
    """F12: D registers with Q, the prefill runs on P. Q waits `orphan_s` for it, then answers; P ends by its lease."""
    request = world.request("late", "P", "D", 8, 8)
    request.asks = "Q"
    world.run(3.0)


@story()
def prefill_rejected(world: World) -> None:
    """F13: P's leg is rejected before it begins; D is told when it registers."""
    request = world.request("packed", "P", "D", 8, 8, delays=(None, 0.1))
    world.abort(request, "P")
    world.run(0.4)


@story(config=Config({"P": 2}, {"D": 1}))
def one_of_two_feeders_fails(world: World) -> None:
    """F04: two ranks of P feed D. One cannot write, and says so when it is quiet; the other stops, and says so too."""
    world.fabric.fates.extend([(0.05, True), (1.0, False)])
    world.request("late", "P", "D", 8, 8)
    world.run(2.5)


@story(settings={"lease_s": 1.0}, profile={"parked": 1.0, "parked_s": 4.0})
def posted_too_late(world: World) -> None:
    """F09: the transfer thread is slow. When it comes to the write the lease has ended: the claim is refused."""
    world.request("packed", "P", "D", 8, 8)
    world.run(2.5)


@story(settings={"landing_share": 0.5, "staging_bytes": 1 << 16}, config=Config({"P": 1, "Q": 1}, {"D": 1}))
def a_peer_at_its_share(world: World) -> None:
    """F28: P has its share of D's landing memory, and waits for itself; Q is granted what is left."""
    world.fabric.fates.append((0.5, False))
    world.request("packed", "P", "D", 12, 12)
    world.run(0.2)
    world.request("packed", "P", "D", 8, 8)
    world.run(0.02)
    world.request("packed", "Q", "D", 16, 16)
    world.run(1.2)


@story()
def asked_again(world: World) -> None:
    """F34: D was preempted after its load and asks for the same transfer again: P says at once that it is over."""
    request = world.request("packed", "P", "D", 8, 8)
    world.run(0.6)
    world.processes["D"].host.decode(request)
    world.run(0.3)


@story(profile={"unfit": 1.0}, cold=True)
def unfit_peer(world: World) -> None:
    """F25: P's host finds at the handshake that D does not fit, and says why. D's transfer fails, never registered."""
    world.request("packed", "P", "D", 8, 8)
    world.run(0.6)


@story()
def preempted_between_chunks(world: World) -> None:
    """F20, F21: P is preempted after its first chunk. What was packed leaves; the rest follows when it is computed."""
    request = world.request("packed", "P", "D", 16, 16, chunked=True)
    world.run(0.15)
    host = world.processes["P"].host
    host.preempt(host.sending[request.tid])
    world.run(1.5)


@story(profile={"blocks": 4}, settings={"staging_bytes": 1600})
def preempted_before_its_gather(world: World) -> None:
    """F21, F28: t2's first parts fill D's share of staging and wait there for room when P is preempted. They are taken
    back, so that t3, which has P's whole cache, can leave; then t2 is computed again, and goes from its first token.
    """
    world.fabric.rooms.extend((5.0, 5.0))
    request = world.request("packed", "P", "D", 16, 16, chunked=True)
    world.run(0.05)
    world.request("packed", "P", "D", 12, 12)
    world.run(0.1)
    host = world.processes["P"].host
    host.preempt(host.sending[request.tid])
    world.run(2.0)


@story(config=Config({"A": 1, "B": 1}, {"A": 1, "B": 1}))
def both_lack_a_registration(world: World) -> None:
    """F19: a registration is lost in each direction. Numbered beats find that out; their answers are not answered."""
    for _ in range(2):
        world.network.lose_next.append(lambda source, target, m: isinstance(m, msg.Register))
    world.request("packed", "A", "B", 8, 8)
    world.request("packed", "B", "A", 8, 8)
    world.run(2.5)


@story(profile={"straggle_s": 0.6})
def a_grant_overtakes_its_registration(world: World) -> None:
    """F19: a grant overtakes its registration. A beat has both said again, of which the grant is lost."""
    request = world.request("pull", "P", "D", 8, 8, profile=replace(world.profile, straggle=1.0))
    world.run(0.05)
    request.profile = None
    world.run(0.2)
    world.network.lose_next.append(lambda source, target, m: isinstance(m, msg.Grant))
    world.run(2.5)


@story(cold=True)
def an_answer_of_the_dead(world: World) -> None:
    """F07: an answer that P's predecessor gave, on a link that D forgot since, is no proof of P's death."""
    late: list[Any] = []
    world.network.lose_next.append(lambda source, target, m: isinstance(m, msg.Welcome) and not late.append(m))
    world.processes["D"].receive(0, ev.Greet(("P", 0)))
    world.run(1.0)
    world.kill("P")
    world.start("P")
    world.request("pull", "P", "D", 4, 4)
    world.run(1.0)
    world.fabric.fates.append((1.0, False))
    world.request("early", "P", "D", 8, 8)
    world.run(0.4)
    for word in (msg.Cancelled(late[0].src, late[0].dst, 1), late[0]):
        world.note(("D", 0), f"! of the first P, late: {type(word).__name__}")
        world.processes["D"].receive(0, ev.Received(("P", 0), word))
        world.run(0.1)
    world.run(1.0)


def main() -> None:
    """Write all transcripts, or say what differs."""
    for name in STORIES:
        path, text = FOLDER / f"{name}.txt", tell(name)
        if "--write" in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is not what happens now")


if __name__ == "__main__":
    main()
