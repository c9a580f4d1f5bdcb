"""One rank in an exhaustive world: the real ``Endpoint``, its transport, and its clock. No choice is made here.

What it does becomes effects on the world: items for the soup (messages, gathers, posts, writes, connections under way),
events for the books of its engine, reports for its ledger.
"""

from __future__ import annotations

from typing import Any

from pushkv.model.protocol import Endpoint, Settings
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.explore.violation import Violation

REPORTS = (ev.Offered, ev.Landed, ev.Broken, ev.Settled, ev.Sent, ev.Released)
Effect = tuple[Any, ...]


def plain(message: msg.Message) -> msg.Message:
    """``message`` with its idle numbers made equal: of a beat's number it matters whether there is one, its echo is not
    looked at.
    """
    if isinstance(message, msg.Beat):
        return msg.Beat(
            message.src, message.dst, min(1, message.number), min(1, message.echo), message.highest, message.lowest,
            message.open, message.missing,
        )  # fmt: skip
    return message


class Rank:
    """Every method is one event; what follows is appended to ``out``."""

    def __init__(self, engine: str, rank: int, incarnation: int, settings: Settings) -> None:
        self.me = (engine, rank)
        self.now = 0.0
        self.endpoint = Endpoint(incarnation, settings)
        self.transport: dict[ev.Link, int] = {}

    @property
    def wake_s(self) -> float:
        """Time to the next deadline."""
        return self.endpoint.wake_at - self.now

    def lost(self, handle: int) -> bool:
        """See ``Parts.lost``."""
        sender = self.endpoint.sender
        if not sender.lost(handle):
            return False
        write = sender._writes[handle]
        return write.part == write.shard.parts - 1

    # ---------------------------------------------------------------- events

    def passes(self, span_s: float, out: list[Effect]) -> None:
        """Time goes by and nothing happens here."""
        self.now += span_s

    def timer(self, out: list[Effect]) -> None:
        """Its deadline has come."""
        self._step((), out)

    def hears(self, source: ev.Link, message: msg.Message, out: list[Effect]) -> None:
        """A message comes in."""
        self._step((ev.Received(source, message),), out)

    def takes(self, event: ev.Record, out: list[Effect]) -> None:
        """A command of the ledger or the host, or word from fabric and staging."""
        self._step((event,), out)

    def fence(self, transfer_id: str, out: list[Effect]) -> None:
        """All commands before this one are taken."""
        out.append(("books", ("passed", self.me[1], transfer_id)))

    def connects(self, link: ev.Link, incarnation: int, out: list[Effect]) -> None:
        """The transport is there."""
        self.transport[link] = incarnation
        self._step((ev.Connected(link, incarnation),), out)

    def claims(self, post: ev.Post, out: list[Effect]) -> None:
        """The moment of posting."""
        sender = self.endpoint.sender
        write = sender._writes.get(post.handle)
        attempt = write.shard.attempt if write is not None else 0
        if not sender.claim(post.handle, self.now):
            return
        incarnation = self.transport.get(post.link)
        if incarnation is None:
            raise Violation(f"I1: {self.me} posts to {post.link} without a transport")
        key = (post.link, self.me, incarnation, attempt)
        if not post.packed:
            out.append(("books", ("reads", self.me[1], post)))
        out.append(("write", post, key))

    # ---------------------------------------------------------------- what follows

    def _step(self, events: tuple[ev.Record, ...], out: list[Effect]) -> None:
        actions: list[Any] = []
        self.endpoint.step(events, self.now, actions)
        for action in actions:
            if isinstance(action, ev.Send):
                if isinstance(action.message, (msg.Register, msg.Grant)):
                    out.append(("books", ("tells", self.me, action.link, action.message)))
                out.append(("send", action.link, plain(action.message)))
            elif isinstance(action, REPORTS):
                out.append(("up", ("hears", ev.FromRank(self.me[1], action))))
            elif isinstance(action, ev.Connect):
                out.append(("connect", action.link, action.incarnation))
            elif isinstance(action, ev.Disconnect):
                if self.transport.get(action.link) == action.incarnation:
                    del self.transport[action.link]
            elif isinstance(action, ev.Pack):
                out.append(("books", ("gathers", self.me[1], action)))
                out.append(("pack", action.handle, action.transfer_id))
            elif isinstance(action, ev.Post):
                out.append(("post", action))
            elif isinstance(action, ev.Abandon):
                out.append(("abandon", action.handle))
            else:
                raise AssertionError(f"{action} is no action of a rank")
        if self.endpoint.wake_at <= self.now:
            raise AssertionError(f"{self.me} wants to be woken in the past: {self.endpoint.wake_at} at {self.now}")

    # ---------------------------------------------------------------- the end

    def left(self) -> dict[str, Any]:
        """What is still held here."""
        found: dict[str, Any] = {"staged": self.endpoint.sender.staged_bytes}
        for half in (self.endpoint.sender, self.endpoint.receiver):
            sizes = half.sizes()
            for table in ("transfers", "writes", "live", "short", "armed"):
                found[f"{table} of {type(half).__name__}"] = sizes.get(table, 0)
        return {key: value for key, value in found.items() if value}
