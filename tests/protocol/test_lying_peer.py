"""A peer that says anything at any time (F26, F27) spoils its own transfers and nothing else.

No byte moves here: a liar can always corrupt what it was asked to write. What is checked is that nothing raises, that
every table stays bounded, and that the books close when the liar's process is gone.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.model.protocol import GAVE_WAY, Endpoint, Ledger, Settings, decode, encode
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg

ME, LIAR, LINK = 7, 8, ("X", 0)
SETTINGS = Settings(
    tombstones_per_link=8, remembered_ids=8, open_per_link=8, landing_segments=4, staging_bytes=1000, links=4
)
small = st.integers(0, 6)
names = st.sampled_from(("a", "b", "c"))
memory = st.none() | st.lists(small, max_size=3)
asks = st.lists(st.builds(msg.Ask, small, st.integers(0, 4), small), max_size=4).map(tuple)
head = {"src": st.just(LIAR), "dst": st.just(ME)}
attempt = {**head, "attempt": small}
reasons = st.sampled_from((GAVE_WAY, msg.FORGOTTEN, "lease", ""))
LIES = st.one_of(
    st.builds(
        msg.Register,
        **attempt,
        transfer_id=names,
        tokens=small,
        fanout=small,
        packed=st.booleans(),
        lowest=small,
        memory=memory,
    ),
    st.builds(msg.Grant, **attempt, memory=memory),
    st.builds(msg.Cancel, **attempt, transfer_id=names, requeue=st.booleans()),
    st.builds(msg.Offer, **attempt, tokens=small, finished=st.booleans()),
    st.builds(msg.Written, **attempt, part=small, tokens=small, last=st.booleans()),
    st.builds(msg.Failed, **attempt, reason=reasons),
    st.builds(msg.Cancelled, **attempt),
    st.builds(
        msg.Beat,
        **head,
        number=small,
        echo=small,
        highest=small,
        lowest=small,
        open=asks,
        missing=st.lists(small, max_size=3).map(tuple),
    ),
    st.builds(msg.Hello, src=st.sampled_from((LIAR, 9)), dst=st.sampled_from((0, ME)), number=small, floor=small),
    st.builds(msg.Welcome, src=st.sampled_from((LIAR, 9)), dst=st.just(ME), echo=small, floor=small),
)
ours = st.sampled_from(
    ("send a", "send b", "receive c", "receive d", "receive e early", "time", "wait", "abort", "give way")
)


class Victim:
    """One rank with its ledger, and a host that does what it is told."""

    def __init__(self) -> None:
        self.endpoint, self.ledger = Endpoint(ME, SETTINGS), Ledger(SETTINGS)
        self.now = 0.0
        self.incoming: dict[str, bool] = {}
        self.step([ev.Received(LINK, msg.Hello(LIAR, 0, 1))])

    def step(self, events: list[Any]) -> None:
        """One step, and all that follows from it at once."""
        todo: list[tuple[str, Any]] = [("rank", event) for event in events]
        if not events:
            todo = [("tick", None)]
        while todo:
            where, event = todo.pop(0)
            out: list[Any] = []
            if where == "ledger":
                self.ledger.step([event], self.now, out)
                todo += [follow for action in out for follow in self.host(action)]
            else:
                self.endpoint.step([] if where == "tick" else [event], self.now, out)
                todo += [follow for action in out for follow in self.fabric(action)]
        assert all(size <= 200 for size in self.endpoint.sender.sizes().values())
        assert all(size <= 200 for size in self.endpoint.receiver.sizes().values())

    def fabric(self, action: Any) -> list[tuple[str, Any]]:
        """Everything completes at once."""
        if isinstance(action, ev.Send):
            encode(action.message)
            return []
        if isinstance(action, ev.Connect):
            return [("rank", ev.Connected(action.link, action.incarnation))]
        if isinstance(action, ev.Pack):
            return [("rank", ev.Packed(action.handle))]
        if isinstance(action, ev.Post):
            claimed = self.endpoint.sender.claim(action.handle, self.now)
            return [("rank", ev.WriteDone(action.handle))] if claimed else []
        if isinstance(action, (ev.Abandon, ev.Disconnect)):
            return []
        return [("ledger", ev.FromRank(0, action))]

    def host(self, action: Any) -> list[tuple[str, Any]]:
        """Allocates when asked; a verdict is given once."""
        if isinstance(action, (ev.ToRanks, ev.ToRank)):
            return [("rank", action.command)]
        if isinstance(action, ev.Admit):
            return [("ledger", ev.Allocated(action.transfer_id, [1, 2]))]
        if isinstance(action, (ev.Ready, ev.Fail)):
            assert self.incoming[action.transfer_id] is False
            self.incoming[action.transfer_id] = True
            return [("ledger", ev.Loaded(action.transfer_id))] if isinstance(action, ev.Ready) else []
        return []

    def act(self, what: str) -> None:
        """Something honest happens."""
        word, name = what.split()[0], what.split()[-1]
        if word == "send" and name not in self.incoming:
            self.incoming[name] = True
            out: list[Any] = []
            self.ledger.step([ev.Hold(name, 6, 10, True)], self.now, out)
            self.step([action.command for action in out])
            self.step([ev.Computed(name, 3, False), ev.Preempted(name), ev.Computed(name, 6, True)])
        elif word == "receive" and what not in self.incoming:
            self.incoming[what] = False
            memory = [3] if what.endswith("early") else None
            arrived = ev.Arrived(what, "X", ((LINK,),), 4, name == "c", int(name == "c"), 1, memory)
            out = []
            self.ledger.step([arrived], self.now, out)
            self.step([follow[1] for action in out for follow in self.host(action)])
        elif word == "abort":
            out = []
            self.ledger.step([ev.Aborted("receive d")], self.now, out)
            self.step([follow[1] for action in out for follow in self.host(action)])
        elif what == "give way":
            self.step([ev.GiveWay()])
        elif word in ("time", "wait"):
            self.now += 1.0 if word == "time" else 20.0
            self.step([])


@given(st.lists(LIES | ours, min_size=15, max_size=60))
@settings(max_examples=250, deadline=None)
def test_a_peer_that_lies_raises_nothing_and_leaves_nothing(script: list[Any]) -> None:
    victim = Victim()
    for line in script:
        if isinstance(line, str):
            victim.act(line)
        else:
            victim.step([ev.Received(LINK, decode(encode(line)))])
    for incarnation in (LIAR, 9):
        victim.step([ev.ProcessGone(LINK, incarnation)])
        for _ in range(3):
            victim.now += 600.0
            victim.step([])
            victim.step([])
    assert all(victim.incoming.values())
    assert victim.ledger.open() == (0, 0)
    assert victim.ledger.quarantined() == 0
    assert victim.ledger.landing_free == SETTINGS.landing_segments
    for half in (victim.endpoint.sender, victim.endpoint.receiver):
        assert {name: half.sizes()[name] for name in ("transfers", "live", "armed")} == (
            {"transfers": 0, "live": 0, "armed": 0}
        )
