"""What vLLM's side of the connector needs of the rest of it: the office (one per engine) and the ranks, as protocols.

Decides nothing: records and signatures only. `scheduler.py` and `worker.py` are written against these and against
nothing of vLLM; `office.py` and `rank.py` fulfil them; tests put a pair of engines without transport in their place.

Who calls what, and from where: everything of an `Office` but `stop` is called on vLLM's engine thread, takes O(1) and
never blocks; everything of a `Rank` is called on the worker's thread. Each has a transfer thread of its own beside it.

A transfer id is, for an `Office`, vLLM's request id (`handles.py`), and for a `Rank` the *key* that `identity.py` makes
(the router's transfer id, the child, a digest of the prompt).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pushkv.model.layout import Layout
from pushkv.model.protocol import events as ev
from pushkv.reference.settings import ConnectorSettings

if TYPE_CHECKING:
    from pushkv.reference.identity import Identity

BlockIds = tuple[list[int], ...]
"""vLLM's block lists, one per cache group. Handed on by reference: whoever keeps one must not change it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the ranks of another engine are, as the router told us: rank r listens on `port + r`."""

    engine_id: str
    host: str
    port: int
    tp_size: int


@dataclass(frozen=True, slots=True)
class RankCard:
    """What the scheduler's process must know of one rank before it can open the office. vLLM carries it there
    (`get_handshake_metadata`), so it must pickle. pieces_per_block: contiguous pieces of one block, over all layers.
    device: where the cache lies, "cuda" or "cpu".

    landing_bytes, staging_bytes: what the rank could set aside. bytes_per_token: of this rank, over all layers of the
    full-attention groups. door: how the office reaches the rank when they do not share a process ("" when they do).
    """

    rank: int
    landing_bytes: int
    staging_bytes: int
    bytes_per_token: int
    bytes_per_request: int = 0
    pieces_per_block: int = 1
    device: str = "cpu"
    door: str = ""


class Held(msgspec.Struct, frozen=True):
    """Word to the office: the prompt of `identity` is computed here, and its first `tokens` tokens are held for whoever
    asks for them. Its request id is what this transfer is called in all words and news.
    """

    identity: Identity
    tokens: int
    chunked: bool


class Wanted(msgspec.Struct, frozen=True):
    """Word to the office: a request waits for the last `tokens` of the `total` tokens of its prompt; 0: they are not
    needed, and the peer is told. transfer_id: the request id, which is what this transfer is called in all words and
    news. identity: called on the office's thread. params: the router's, not looked at yet. packed: None lets the office
    choose.
    """

    transfer_id: str
    identity: Callable[[], Identity]
    params: Mapping[str, Any]
    tokens: int
    total: int
    packed: bool | None = None


class Chunk(msgspec.Struct, frozen=True):
    """Word to the office: when the engine's step `step` is done, the first `tokens` tokens of a prefill are in
    `blocks()`, or in the first of them. That takes time that grows with them: not for the engine's thread.
    """

    transfer_id: str
    blocks: Callable[[], BlockIds]
    tokens: int
    step: int


class Told(msgspec.Struct, frozen=True):
    """Word to the office, and on to the ranks: they have heard of all chunks of the steps before `step`."""

    step: int


class Complete(msgspec.Struct, frozen=True):
    """Word to the office: a prefill of `tokens` tokens is finished, and its `blocks` are held."""

    transfer_id: str
    blocks: BlockIds
    tokens: int


class Load(msgspec.Struct, frozen=True):
    """One request whose landed tokens [first, stop) every rank must scatter into `blocks` before this step's forward.

    request_id: vLLM's. The tokens are counted from the prompt's first.
    """

    request_id: str
    transfer_id: str
    blocks: BlockIds
    first: int
    stop: int


class StepOrders(msgspec.Struct):
    """What every worker does and reports in one step; the scheduler side has decided all of it.

    sent, received: requests whose blocks vLLM may free or use. failed: requests whose load failed; they are in
    `received` too, in the same step or later. invalid: blocks of `failed`, for versions that know only those.
    preempted: prefills that have lost their blocks, which this step may overwrite. step: number of this
    step. chunks: it computes what is sent chunk by chunk, so that the ranks must hear when it is enqueued. early: vLLM
    neither zeroes nor copies blocks in this step, so that `load` may be begun before it prepares its forward. begun: of
    `load`, what is under way. apart: the requests of `load` do not run in this step: they are reported when it is done.
    """

    load: list[Load] = []
    sent: list[str] = []
    received: list[str] = []
    failed: list[str] = []
    invalid: list[int] = []
    preempted: list[str] = []
    step: int = 0
    chunks: bool = False
    early: bool = False
    begun: list[Loading] = []
    apart: bool = False

    def __bool__(self) -> bool:
        return bool(self.load or self.sent or self.received or self.failed or self.invalid or self.preempted)


IDLE = StepOrders()
"""Nothing to do: one for all steps. Nobody may add to it."""


class Office(Protocol):
    """The scheduler's side of one engine's transfers: it owns the `Ledger`."""

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since the start, of the office and of the ledger; names in `metrics.py`."""
        ...

    @property
    def gauges(self) -> Mapping[str, float]:
        """What is so now; names in `metrics.py`."""
        ...

    @property
    def news(self) -> deque[ev.Record]:
        """What has happened: `Admit`, `Ready`, `Fail`, `Free`, `TakeBack`, `Finished`, `Release`. The engine's thread
        takes them from the left. Always the same object: vLLM asks thousands of times a second, and a look at an empty
        queue costs no call.
        """
        ...

    @property
    def inbox(self) -> deque[Any]:
        """What the engine's thread has to say, in this order: `Held`, `Wanted`, `Chunk`, `Complete`, `Told`; for the
        ledger `Allocated`, `Starved`, `Loaded`, `Aborted`; for the sending side of all ranks `Computed` (it has begun),
        `Preempted`, `GiveWay`, `Abort`. Always the same object: appending a word costs nothing else. `knock` follows.

        A `Held` or a `Wanted` is the first word about a request id. If another live one has the same key, or is no
        identity, this one is refused: a receiving one's verdict is `Fail`, a sending one is told `Finished` and
        `Release` when its prompt has ended. So is a `Wanted` whose books still hold an earlier transfer of its key (not
        settled yet). `Allocated.memory` is called on another thread: making block lists takes time that grows with
        them. A word about a transfer that the books have closed meanwhile (the news is still in the queue) is dropped.
        """
        ...

    def knock(self) -> None:
        """Has the office look at what was said. Once for all that a hook has to say: its thread wants the interpreter
        as soon as it is awake.
        """
        ...

    def key(self, handle: str) -> str:
        """What the ranks call the transfer of `handle`, once there was news of it."""
        ...

    def stop(self, drain_s: float) -> None:
        """Waits until what is finished has been sent, `drain_s` at the most, then ends. May be called twice."""
        ...


class Loading(Protocol):
    """The scatters of a step, under way."""

    loads: Sequence[Load]

    def wait(self) -> Sequence[Load]:
        """Returns when work that is enqueued from now on (device stream) or done from now on (host) sees the bytes.

        Raises nothing; what it returns has failed: those blocks do not hold what they should, and must be reported as
        invalid.
        """
        ...


class Rank(Protocol):
    """The worker's side: it owns the `Endpoint`, the transport and the segment pools."""

    @property
    def card(self) -> RankCard: ...

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since the start; names in `metrics.py`."""
        ...

    @property
    def gauges(self) -> Mapping[str, float]:
        """What is so now; names in `metrics.py`."""
        ...

    def drain_records(self) -> Sequence[Mapping[str, Any]]:
        """Records of the transfers that ended since the last call (bounded: old ones are dropped and counted).

        Keys: side ("send", "receive", "load"), transfer_id, ok, reason, tokens, packed, bytes, descriptors; durations
        that apply (gather_s, post_s, wire_s, scatter_s, handover_s); and when things happened, as seconds of the
        monotonic clock: `prompts.record_of` for what is sent, `landing` for what lands and is loaded.
        """
        ...

    def scatter(self, loads: Sequence[Load]) -> Loading:
        """Begins all `loads` of a step; they are ordered before whatever the caller does after `wait`.

        When the bytes are out of the landing memory, the rank tells the office, which tells the ledger `Loaded` once
        every rank has said so: nobody else tells `Loaded` for a transfer that is scattered.
        """
        ...

    def enqueued(self, step: int) -> None:
        """The forward pass of `step` is enqueued on the calling thread's stream (on a host: done)."""
        ...

    def fence(self, request_ids: Sequence[str], step: int) -> None:
        """Returns when what is enqueued from now on comes after all reading of the blocks that these preempted prefills
        had before `step`, also of what the rank has not heard yet: the office may be behind, and not know their keys.
        `Told` follows.
        """
        ...

    def stop(self, drain_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What both sides of one engine are opened with. port: of its rank 0, data-parallel offset included. apart: its
    scheduler and its only rank live in different processes.
    """

    settings: ConnectorSettings
    engine_id: str
    tp_size: int
    dp_rank: int
    host: str
    port: int
    model: str
    dtype: str
    block_tokens: int
    vllm_version: str
    send: bool
    receive: bool
    apart: bool = False


class OpenRank(Protocol):
    """`pushkv.reference.rank.open_rank`. `regions`: flat uint8 tensors, one per region of `layout`."""

    def __call__(self, setup: EngineSetup, rank: int, layout: Layout, regions: Sequence[Any]) -> Rank: ...


class OpenOffice(Protocol):
    """`pushkv.reference.office.open_office`. `local`: the rank, when it lives in this process and is the only one."""

    def __call__(self, setup: EngineSetup, cards: Sequence[RankCard], local: Rank | None) -> Office: ...
