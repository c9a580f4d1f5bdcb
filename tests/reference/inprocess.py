"""Two engines in one process: real ranks, offices, pools and copies; frames by a queue, writes by memmove.

Nothing is injected: every message is what the other engine sent. Frames can be dropped, writes can be slow or fail, so
that faults meet the code that ships. Ranks and office of an engine talk as they do in production: on one thread where
there is one rank, over their local sockets where there are more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from pushkv.model.layout import Layout, View
from pushkv.model.protocol import events as ev
from pushkv.reference import opening
from pushkv.reference.caches import Ranks, layouts_of
from pushkv.reference.cpu_formats import CpuFormat, read_head_part
from pushkv.reference.ports import Address, BlockIds, Complete, EngineSetup, Load
from pushkv.reference.rank import Rank
from pushkv.reference.settings import ConnectorSettings

from .said import chunk, held, wanted

Link = tuple[str, int]

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
HEADS, DIM = 2, 8
BLOCKS = 48
PATIENCE_S = 30.0
FATAL = ("faults:failed turn", "faults:failed action")
"""What no test provokes."""


class AttentionSpec(SimpleNamespace):
    """vLLM's, as far as it is looked at: by its name and these fields."""


class Exchange:
    """Where all channels meet. ``drop(frame)`` says which frames are lost."""

    def __init__(self) -> None:
        self.channels: dict[Link, Channel] = {}
        self.transports: dict[Link, Any] = {}
        self.drop: Callable[[bytes], bool] = lambda frame: False
        self.sent = 0


class Channel:
    """A side channel that is a queue."""

    def __init__(self, exchange: Exchange, me: Link) -> None:
        self.exchange, self.me = exchange, me
        self.box: deque[tuple[Link, bytes]] = deque()
        self.counters: dict[str, int] = {}
        self.poller = zmq.Poller()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller.register(self._bell, zmq.POLLIN)
        exchange.channels[me] = self

    def open(self, link: Link, host: str, port: int) -> str:
        """Addresses mean nothing here."""
        return ""

    def close_link(self, link: Link) -> None:
        """Nothing is kept per link."""

    def trim(self, open_on: Callable[[Link], bool]) -> None:
        """Nothing is kept per link."""

    def replaced(self) -> list[Link]:
        return []

    def send(self, link: Link, frame: bytes) -> bool:
        self.exchange.sent += 1
        target = self.exchange.channels.get(link)
        if target is None or self.exchange.drop(frame):
            return False
        target.box.append((self.me, frame))
        os.eventfd_write(target._bell, 1)
        return True

    def receive(self) -> list[tuple[Link, bytes]]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        frames = []
        while self.box:
            frames.append(self.box.popleft())
        return frames

    def close(self) -> None:
        self.exchange.channels.pop(self.me, None)  # its bell stays open: another thread may be about to ring it


class Transfer:
    """A write that copies when ``due``."""

    def __init__(self, ranges: tuple[Any, Any, Any], due: float) -> None:
        self.ranges, self.due = ranges, due
        self.state = "active"


class MemoryTransport:
    """Writes by memmove, ``delay_s`` after the post; ``fail`` names what goes wrong: ``""``, ``raise`` or ``break``."""

    arrival = "completion"

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.delay_s, self.fail = 0.0, ""
        self.metadata = b"memory"
        self.posted = 0
        self.agents: set[str] = set()

    def register(self, tensors: Iterable[Any]) -> None:
        self.kept = list(tensors)

    def connect(self, metadata: bytes) -> str:
        name = f"agent-{len(self.agents)}"
        self.agents.add(name)
        return name

    def disconnect(self, agent: str) -> None:
        self.agents.discard(agent)

    def post(
        self, agent: str, local: Any, remote: Any, length: Any, here: int, there: int, notice: bytes = b""
    ) -> Transfer:
        if self.fail == "raise":
            raise RuntimeError("post refused")
        assert agent in self.agents
        self.posted += 1
        write = Transfer((local, remote, length), time.monotonic() + self.delay_s)
        if self.fail == "break":
            write.state = "broken"
        return write

    def poll(self, write: Transfer) -> str:
        if write.state == "active" and time.monotonic() >= write.due:
            for source, target, size in zip(*write.ranges, strict=True):
                ctypes.memmove(int(target), int(source), int(size))
            write.state = "done"
        return write.state

    def stop(self, write: Transfer) -> None:
        """What has been posted cannot be stopped."""

    def release(self, write: Transfer) -> bool:
        return write.state != "active"

    def expect(self, room: Any) -> None:
        """No notices here: what is done has arrived."""

    def progress(self) -> list[tuple[str, bytes]]:
        return []

    def close(self) -> None:
        self.agents.clear()


class Engine:
    """One engine with ``tp`` ranks, opened as the connector opens it. ``cpu``: caches as a CPU's kernels keep them.
    ``apart``: the only rank and the office talk as if they were in different processes.
    """

    def __init__(
        self,
        name: str,
        tp: int,
        folder: Path,
        *,
        block: int = 16,
        cpu: bool = False,
        apart: bool = False,
        port: int = 5600,
        **more: Any,
    ) -> None:
        self.name, self.tp, self.block, self.trace = name, tp, block, folder / f"{name}.jsonl"
        given = {"segment_bytes": 4096, "landing_bytes": 16 << 12, "staging_bytes": 16 << 12, "beat_s": 0.1}
        settings = ConnectorSettings(**given | {"dead_peer_s": 20.0, "wait_s": 60.0} | more, trace=str(self.trace))
        send = name.startswith("P")
        address = ("127.0.0.1", port)
        self.setup = EngineSetup(
            settings, name, tp, 0, *address, "model", "float16", block, "0.32.0", send, not send, apart
        )
        self.address = Address(name, *address, tp)
        self.ranks: list[Rank] = []
        self.views: list[tuple[Layout, list[Any]]] = []
        for rank in range(tp):
            layout, regions = caches(name, tp, rank, block, cpu)
            self.views.append((layout, regions))
            self.ranks.append(opening.open_rank(self.setup, rank, layout, regions))
        self.transports: list[Any] = [rank.transport for rank in self.ranks]
        cards = [rank.card for rank in self.ranks]
        assert all(card is not None for card in cards)
        self.office = opening.open_office(self.setup, cards, self.ranks[0] if tp == 1 and not apart else None)
        self._news: list[ev.Record] = []
        self.step = 0

    def until(self, kind: type[ev.Record], transfer_id: str) -> Any:
        """The next news of this kind (``Fail``, too, ends the waiting) about ``transfer_id``."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            while self.office.news:
                self._news.append(self.office.news.popleft())
            for news in self._news:
                if isinstance(news, (kind, ev.Fail)) and news.transfer_id == transfer_id:  # type: ignore[attr-defined]
                    self._news.remove(news)
                    return news
            time.sleep(0.0005)
        raise AssertionError(f"{self.name} is not told {kind.__name__} of {transfer_id}; it has heard {self._news}")

    def say(self, *words: Any) -> None:
        """What the engine's thread says in one hook."""
        self.office.inbox.extend(words)
        self.office.knock()

    # ------------------------------------------------------------ a prefill

    def prefill(self, transfer_id: str, tokens: int, blocks: BlockIds) -> None:
        """Compute a prompt, and hold it."""
        self.say(held(transfer_id, tokens), ev.Computed(transfer_id, 0, False))
        self.compute(transfer_id, tokens, blocks)

    def begin(self, transfer_id: str, tokens: int) -> None:
        """A prefill whose chunks leave as they are computed."""
        self.say(held(transfer_id, tokens, chunked=True), ev.Computed(transfer_id, 0, False))

    def chunk(self, transfer_id: str, tokens: int, blocks: BlockIds, *, late: bool = False) -> None:
        """The step that computes the first ``tokens`` tokens. ``late``: it does so only after it was told of."""
        self.step += 1
        if not late:
            self.fill(transfer_id, tokens, blocks)
        self.say(chunk(transfer_id, blocks, tokens, self.step))
        if late:
            time.sleep(0.02)
            self.fill(transfer_id, tokens, blocks)
        for rank in self.ranks:
            rank.enqueued(self.step)

    def preempt(self, transfer_id: str, tokens: int, blocks: BlockIds) -> None:
        """The next step overwrites ``blocks`` with somebody else's."""
        self.say(ev.Preempted(transfer_id))
        for rank in self.ranks:
            rank.fence([transfer_id], self.step + 1)
        self.fill("somebody else", tokens, blocks)

    def compute(self, transfer_id: str, tokens: int, blocks: BlockIds) -> None:
        """The end of a prefill."""
        self.fill(transfer_id, tokens, blocks)
        self.say(Complete(transfer_id, blocks, tokens))

    def sent(self, transfer_id: str, blocks: BlockIds, tokens: int) -> bool:
        """Wait until the blocks are free, and overwrite them; whether all was sent."""
        self.until(ev.Release, transfer_id)
        self.fill("somebody else", tokens, blocks)
        return bool(self.until(ev.Finished, transfer_id).ok)

    # ------------------------------------------------------------ a load

    def load(self, transfer_id: str, peer: Engine, base: int, tokens: int, blocks: BlockIds, packed: bool) -> str:
        """Load tokens [base, tokens); ``""`` when they are there, or why not."""
        self.say(wanted(transfer_id, peer.address, tokens - base, tokens, packed))
        if not packed:
            told = self.until(ev.Admit, transfer_id)
            if isinstance(told, ev.Fail):
                return told.reason
            self.say(ev.Allocated(transfer_id, lambda: blocks))
            told = self.until(ev.Ready, transfer_id)
            if isinstance(told, ev.Fail):
                self.until(ev.Free, transfer_id)
                return told.reason
            self.say(ev.Loaded(transfer_id))
            return ""
        return self.scatter(transfer_id, base, tokens, blocks)

    def scatter(self, transfer_id: str, base: int, tokens: int, blocks: BlockIds) -> str:
        """Wait until a packed transfer has landed, and load it; ``""``, or why it has not."""
        told = self.until(ev.Ready, transfer_id)
        if isinstance(told, ev.Fail):
            return told.reason
        load = Load(transfer_id, transfer_id, blocks, base, tokens)
        loadings = [rank.scatter([load]) for rank in self.ranks]
        assert not [lost for loading in loadings for lost in loading.wait(PATIENCE_S)]
        return ""

    # ------------------------------------------------------------ the cache

    def fill(self, prompt: str, tokens: int, blocks: BlockIds) -> None:
        for layout, regions in self.views:
            for view in layout.views:
                for head in range(view.head_start, view.head_stop):
                    rows(layout, regions, view, head, blocks)[:tokens] = content(prompt, view, head)[:tokens]

    def check(self, prompt: str, base: int, tokens: int, blocks: BlockIds) -> None:
        """Every token of every layer, part and head of every rank."""
        for layout, regions in self.views:
            assert {view.layer for view in layout.views} == set(LAYERS)
            for view in layout.views:
                for head in range(view.head_start, view.head_stop):
                    found = rows(layout, regions, view, head, blocks)[base:tokens]
                    wanted = content(prompt, view, head)[base:tokens]
                    assert np.array_equal(found, wanted), f"{self.name} rank {layout.rank} {view.key} head {head}"

    # ------------------------------------------------------------ the end

    def emptied(self) -> None:
        """Fail unless nothing is left of any transfer."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            left = self._left()
            if not left:
                return
            time.sleep(0.002)
        raise AssertionError(f"{self.name} keeps {left}")

    def _left(self) -> dict[str, Any]:
        ledger = self.office.ledger
        found: dict[str, Any] = {
            "open": sum(ledger.open()),
            "quarantined": ledger.quarantined(),
            "segments": ledger.segments - ledger.landing_free,
            "words": len(self.office.inbox) + len(self.office._loaded),
            "handles": len(self.office._handles),
        }
        for rank in self.ranks:
            staging = rank.sending.staging
            found |= {f"{rank.number} {key}": value for key, value in rank.landing.sizes().items()}
            found[f"{rank.number} totals"] = len(rank.landing.totals)
            found[f"{rank.number} prompts"] = len(rank.sending.prompts)
            found[f"{rank.number} writes"] = rank.sending.writes_open
            found[f"{rank.number} staging"] = staging.count - staging.free
            found[f"{rank.number} counters"] = {key: count for key, count in rank.counters.items() if key in FATAL}
        return {key: value for key, value in found.items() if value}

    def traces(self) -> list[Path]:
        return sorted(self.trace.parent.glob(f"{self.name}.jsonl*"))

    def stop(self) -> None:
        self.office.stop(1.0)
        for rank in self.ranks:
            rank.stop(1.0)


def play(monkeypatch: pytest.MonkeyPatch) -> Exchange:
    """From here on ranks are opened on the exchange."""
    exchange = Exchange()

    def transport(name: str, backend: str) -> MemoryTransport:
        engine, rank, _ = name.split(".")
        return exchange.transports.setdefault((engine, int(rank)), MemoryTransport())

    monkeypatch.setattr(opening, "SideChannel", lambda me, *address: Channel(exchange, me))
    monkeypatch.setattr(opening, "Transport", transport)
    return exchange


def caches(name: str, tp: int, rank: int, block: int, cpu: bool) -> tuple[Layout, list[Any]]:
    """The cache of one rank, as vLLM registers it: (block, head, token, K then V)."""
    import torch

    heads = max(1, HEADS // tp)
    tensors = {layer: torch.zeros(BLOCKS, heads, block, 2 * DIM, dtype=torch.int16) for layer in LAYERS}
    spec = AttentionSpec(block_size=block, num_kv_heads=heads, head_size=DIM, dtype=torch.int16)
    group = SimpleNamespace(layer_names=list(LAYERS), kv_cache_spec=spec)
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group])
    form = CpuFormat("vec", block) if cpu else None
    return layouts_of(tensors, config, name=name, ranks=Ranks(tp, rank, HEADS), cpu=form)


def rows(layout: Layout, regions: list[Any], view: View, head: int, blocks: BlockIds) -> Any:
    """(token, byte) of what ``blocks`` hold of one head, as the layout says: reads and writes go to the cache."""
    ids = np.asarray(blocks[view.group])
    at = view.offset_bytes + (head - view.head_start) * view.head_stride
    region = regions[view.region].numpy()
    tokens = np.arange(len(ids) * view.block_tokens)
    start = at + ids[tokens // view.block_tokens] * view.block_stride + tokens % view.block_tokens * view.token_stride
    return _Rows(region, start[:, None] + np.arange(view.row_bytes))


class _Rows:
    def __init__(self, region: Any, index: Any) -> None:
        self.region, self.index = region, index

    def __getitem__(self, tokens: slice) -> Any:
        return self.region[self.index[tokens]]

    def __setitem__(self, tokens: slice, values: Any) -> None:
        self.region[self.index[tokens]] = values


def content(prompt: str, view: View, head: int) -> Any:
    """(token, byte): what ``prompt`` has there in every engine, by layer, part and number of the head in the model."""
    named = read_head_part(view.part)
    what = (view.layer, *named[:2], head) if named else (view.layer, view.part, head)
    seed = zlib.crc32(repr((prompt, what)).encode())
    return np.random.default_rng(seed).integers(1, 256, (BLOCKS * 16, view.row_bytes), np.uint8)
