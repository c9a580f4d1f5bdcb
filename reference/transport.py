"""Moving bytes between processes: one NIXL agent, driven by its caller.

Decides how a write is cut into NIXL calls, when it is done, broken or quiet, and what an error of NIXL means. Does not
decide what to write, when to give up waiting, or whether a peer is dead.

Threads. The agent has no progress thread (an idle one spins at a whole core): everything happens inside `post`, `poll`,
`release` and `progress`, which belong to one thread, the transfer thread. Only `connect` is called beside it. NIXL's
own lock must be NIXL_THREAD_SYNC_STRICT for that: with NONE, the default, two threads corrupt it, and RW makes UCX
lock a second time and buys nothing, since loading a peer and fetching notices are exclusive in both. The lock is held
while a peer is loaded, so loading must not wait for the network; it does not (`backends`).

Bounded calls. A write is cut into batches by descriptors and bytes, and `post` and `poll` hand over batches for
`slice_s` at most (plus the one they are in), so that a fragmented write delays no other. All batches are one `Write`.

When is it there? For UCX when it is done, for LIBFABRIC when the target's `progress` returns the write's notice; see
`backends` and `notices`.

When is it quiet? NIXL gives up a handle that is released while active: UCX is asked to cancel and the handle is gone,
which proves nothing ("may not be enough", says its source); so none is released before it has ended. A handle that
ended in an error may have stores under way still: NIXL reports the first failed request, and a failed peer's
connection is torn down in the background. So a broken write is quiet only `drain_s` after its last handle ended.
LIBFABRIC hands an error to whoever polls next, be it the owner or not, and a write whose error another call has taken
never ends: errors are taken by `progress` first, and what is still active `drain_s` later is broken; hence its long
drain time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .backends import BACKENDS, TransportError, attempt, make_agent, words
from .notices import LEAST_BYTES, LEAST_DESCRIPTORS, NOTICE_BYTES, Notices, Room, pack

if TYPE_CHECKING:
    import torch

__all__ = ["Transport", "TransportError", "Write", "agent_name", "link_of"]

Longs = npt.NDArray[np.int64]

BATCH_BYTES = {"DRAM": 32 << 20, "VRAM": 1 << 30}


@dataclass(slots=True, eq=False)
class Write:
    """One write under way. Only `Transport` changes it.

    state: "active", "done" or "broken". reason: why it is broken. descriptors, size_bytes: of the whole write. make_s,
    post_s: time spent so far in describing it to NIXL, and in handing it over.
    """

    agent: str
    number: int
    descriptors: int
    size_bytes: int
    state: str = "active"
    reason: str = ""
    make_s: float = 0.0
    post_s: float = 0.0
    _batches: deque[tuple[slice, bytes]] = field(default_factory=deque, repr=False)
    _arrays: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = field(default=None, repr=False)
    _active: deque[Any] = field(default_factory=deque, repr=False)  # NIXL handles
    _failed: list[Any] = field(default_factory=list, repr=False)
    _suspect_at: float | None = None
    _quiet_at: float | None = None
    _released: bool = False


def agent_name(engine_id: str, rank: int, incarnation: int) -> str:
    """The NIXL name of one rank of one process: it differs after a restart, so that nothing old can be meant by it."""
    return f"{engine_id}.{rank}.{incarnation:016x}"


def link_of(agent: str) -> tuple[str, int] | None:
    """(engine id, rank) in such a name, or None for another one."""
    engine, rank, incarnation = [*agent.rsplit(".", 2), "", ""][:3]
    return (engine, int(rank)) if incarnation and len(rank) < 10 and rank.isascii() and rank.isdigit() else None


class Transport:
    """The NIXL agent of one rank.

    name: unique among all processes and restarts, see `agent_name`. batch_descriptors, batch_bytes: at most so much in
    one NIXL call (a single larger descriptor is not split), and not less than `notices` says: by that a peer knows how
    many batches there can be. Bytes that are not given follow from the memory: a host may have to copy what it posts, a
    device does not. slice_s: `post` and `poll` begin no further batch after
    this time. drain_s: see the module; the backend's own value if not given. Raises `TransportError`, also if NIXL is
    not installed.
    """

    def __init__(
        self,
        name: str,
        backend: str = "UCX",
        *,
        batch_descriptors: int = 512,
        batch_bytes: int | None = None,
        slice_s: float = 0.002,
        drain_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if backend not in BACKENDS:
            raise TransportError(f"backend {backend!r} is not known; choose from {', '.join(BACKENDS)}")
        if batch_descriptors < LEAST_DESCRIPTORS or (batch_bytes is not None and batch_bytes < LEAST_BYTES):
            raise TransportError(
                f"batches of {batch_descriptors} descriptors and {batch_bytes} bytes: at least {LEAST_DESCRIPTORS} and"
                f" {LEAST_BYTES}"
            )
        self.name = name
        self.backend = BACKENDS[backend]
        self.arrival = self.backend.arrival
        self.drain_s = self.backend.drain_s if drain_s is None else drain_s
        self.counters = {"posts": 0, "batches": 0, "errors": 0, "notices": 0}
        self._limits = (batch_descriptors, batch_bytes or BATCH_BYTES["DRAM"], slice_s)
        self._batch_bytes = batch_bytes
        self._clock = clock
        self._number = 0
        self._memory = "DRAM"
        self._device: int | None = None  # CUDA device that the calling thread must have current
        self._thread: int | None = None
        self._registered: list[Any] = []
        self._lock = threading.Lock()  # guards what `connect` shares with the transfer thread
        self._peers: dict[str, bytes] = {}
        self._lost: set[str] = set()
        self._writes: set[Write] = set()
        self._notices = Notices()
        self._agent = make_agent(name, self.backend)

    @property
    def metadata(self) -> bytes:
        """What a peer needs for `connect`: address and registrations, so take it after `register`."""
        return bytes(attempt("reading our metadata", self._agent.get_agent_metadata))

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Opens the tensors' memory to peers. All on one kind of device; CPU tensors are DRAM, CUDA tensors VRAM."""
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise TransportError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
            memory, device = ("VRAM", int(tensor.get_device())) if tensor.is_cuda else ("DRAM", 0)
            if self._registered and memory != self._memory:
                raise TransportError(f"{memory} memory cannot be registered beside {self._memory}")
            self._memory, self._device = memory, device if tensor.is_cuda else None
            self._limits = (self._limits[0], self._batch_bytes or BATCH_BYTES[memory], self._limits[2])
            self._enter()
            size = tensor.numel() * tensor.element_size()
            what = [(tensor.data_ptr(), size, device, "")]
            done = attempt(f"registering {size} bytes", self._agent.register_memory, what, memory)
            self._registered.append((done, tensor))  # the memory must outlive its registration

    def connect(self, metadata: bytes) -> str:
        """Makes a peer known; returns its agent's name. Called beside the transfer thread; idempotent.

        It says nothing about whether the peer is there. Raises `TransportError`.
        """
        with self._lock:
            for name, known in self._peers.items():
                if known == metadata:  # loading it again would end NIXL's handles of active writes
                    return name
            found = attempt("loading a peer", self._agent.add_remote_agent, metadata)
            name = found.decode() if isinstance(found, bytes) else str(found)
            self._peers[name] = metadata
            self._lost.discard(name)
            return name

    def disconnect(self, agent: str) -> None:
        """Forgets a peer that has no write active, or is gone (the caller has evidence of it).

        Writes that are active break, and are quiet after the drain time. An unknown peer is no error.
        """
        for write in [write for write in self._writes if write.agent == agent]:
            write._batches.clear()
            if write._active or write.state == "active":
                write._failed += write._active
                write._active.clear()
                self._break(write, "the peer was disconnected")
            self._let_go(write)  # they keep the connection open, and nobody is there to be harmed
        with self._lock:
            known = self._peers.pop(agent, None)
            self._lost.discard(agent)
            self._notices.forget(agent)
            if known is not None:
                self._forget(agent)

    def post(
        self,
        agent: str,
        local: Longs,
        remote: Longs,
        length: Longs,
        local_device: int = 0,
        remote_device: int = 0,
        notice: bytes = b"",
    ) -> Write:
        """Starts to write `length[i]` bytes from address `local[i]` to the peer's address `remote[i]`, for all i.

        *_device: CUDA devices, 0 on a CPU. notice: what the peer's `progress` returns once all has arrived (empty: no
        notice). Nothing to write is done at once, and its notice is sent. Raises `TransportError` if nothing was handed
        over; whatever goes wrong later breaks the write.
        """
        if not len(local) == len(remote) == len(length) or (len(length) and int(length.min()) < 1):
            raise TransportError(f"{len(local)} local, {len(remote)} remote addresses, {len(length)} sizes above 0")
        if len(notice) > NOTICE_BYTES:
            raise TransportError(f"a notice of {len(notice)} bytes, at most {NOTICE_BYTES}")
        self._number += 1
        write = Write(agent, self._number, len(length), int(length.sum()))
        self._enter()
        self._revive(agent)
        self.counters["posts"] += 1
        if not len(length):
            if notice:
                attempt("sending a notice", self._agent.send_notif, agent, pack(write.number, 0, 1, notice))
            write.state = "done"
            return write
        write._arrays = (_rows(local, length, local_device), _rows(remote, length, remote_device))
        cuts = _cuts(length, *self._limits[:2])
        for index, (start, stop) in enumerate(cuts):
            head = pack(write.number, index, len(cuts), notice) if notice else b""
            write._batches.append((slice(start, stop), head))
        self._hand_over(write, first=True)
        self._writes.add(write)
        return write

    def poll(self, write: Write) -> str:
        """Drives the write on: "active", "done" or "broken" (then see `reason`). Never raises."""
        if write.state == "active":
            self._hand_over(write)
            self._check(write)
        return write.state

    def stop(self, write: Write) -> None:
        """Hands over no further batch. The write breaks when those under way have ended, or is done if all were."""
        if write._batches:
            write._batches.clear()
            write.reason = "stopped"
            self._check(write)

    def release(self, write: Write) -> bool:
        """True once nothing of the write can store or be read any more; then it is forgotten. False: ask again later.

        Never raises.
        """
        if write._released:
            return True
        if write.state == "active" or (write.state == "broken" and not self._drained(write)):
            return False
        self._let_go(write)
        write._released = True
        write._arrays = None
        self._writes.discard(write)
        return True

    def expect(self, room: Callable[[str, bytes], Room | None]) -> None:
        """Which notices this side waits for: see `Notices`."""
        self._notices.expect(room)

    def progress(self) -> list[tuple[str, bytes]]:
        """Lets NIXL work, also as a target; returns the (agent, notice)s of writes that have arrived. Never raises."""
        self._drive()
        self.counters["notices"] = self._notices.refused
        return self._notices.take()

    def close(self) -> None:
        """Ends everything. Active writes are abandoned: close when all are released, or at the end of the process."""
        for agent in list(self._peers):
            self.disconnect(agent)
        self._writes.clear()
        while self._registered:
            done, _ = self._registered.pop()
            self._quietly(self._agent.deregister_memory, done)
        self._agent = None

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _hand_over(self, write: Write, first: bool = False) -> None:
        end = (posted := time.perf_counter()) + self._limits[2]
        while write._batches and write._arrays is not None:
            chosen, message = write._batches[0]
            handle: Any = None
            begun = posted
            try:
                sides = [self._agent.get_xfer_descs(side[chosen], self._memory) for side in write._arrays]
                handle = self._agent.initialize_xfer("WRITE", *sides, write.agent, message)
                if not handle:
                    raise RuntimeError("NIXL made no handle")
                write._active.append(handle)
                made = time.perf_counter()
                write.make_s += made - begun
                if self._agent.transfer(handle) == "ERR":
                    raise RuntimeError("NIXL returned an error")
            except Exception as error:
                self.counters["errors"] += 1
                if handle is None and first and not write._active:
                    raise TransportError(f"posting to {write.agent} failed: {words(error)}") from error
                if handle is not None:  # part of the batch may be under way
                    write._active.pop()
                    write._failed.append(handle)
                self._break(write, f"posting failed: {words(error)}")
                break
            posted = time.perf_counter()
            write.post_s += posted - made
            write._batches.popleft()
            self.counters["batches"] += 1
            if posted > end:
                break

    def _check(self, write: Write) -> None:
        """Looks at the oldest batches; one that is still active hides the later ones, which is enough."""
        if not self.backend.owned_errors:
            self._drive()
        while write._active:
            handle = write._active[0]
            try:
                state = self._agent.check_xfer_state(handle)
                error: object = "NIXL returned an error"
            except Exception as raised:
                state, error = "ERR", raised
            if state == "PROC":
                if write._suspect_at is not None and self._clock() - write._suspect_at > self.drain_s:
                    write._failed += write._active
                    write._active.clear()
                    self._break(write, "still active long after an error of the fabric")
                return
            write._active.popleft()
            if state == "DONE":
                self._quietly(handle.release)
            else:
                self.counters["errors"] += 1
                write._failed.append(handle)
                self._break(write, f"the write failed: {words(error)}")
        if write.state == "active" and not write._batches:
            write.state = "broken" if write.reason else "done"

    def _break(self, write: Write, reason: str) -> None:
        write._batches.clear()
        write._quiet_at = None
        if write.state == "active":
            write.state, write.reason = "broken", reason
        if self.backend.owned_errors:  # NIXL has forgotten the peer
            with self._lock:
                self._lost.add(write.agent)

    def _drained(self, write: Write) -> bool:
        self._check(write)
        if write._active:
            return False
        if not write._failed and write._quiet_at is None:
            return True  # stopped, nothing went wrong
        now = self._clock()
        if write._quiet_at is None:
            write._quiet_at = now + self.drain_s
        return now >= write._quiet_at

    def _let_go(self, write: Write) -> None:
        if write._failed:
            write._quiet_at = write._quiet_at or self._clock() + self.drain_s
        for handle in write._failed:
            self._quietly(handle.release)
        write._failed.clear()

    def _revive(self, agent: str) -> None:
        """After an error NIXL has forgotten the peer; whether it is there shows in the next write."""
        with self._lock:
            if agent not in self._peers:
                raise TransportError(f"agent {agent} is not connected")
            if agent in self._lost:
                self._forget(agent)
                attempt("loading a peer", self._agent.add_remote_agent, self._peers[agent])
                self._lost.discard(agent)

    def _forget(self, agent: str) -> None:
        self._quietly(self._agent.remove_remote_agent, agent)

    def _drive(self) -> None:
        self._enter()
        for _ in range(16):  # errors come one at a time
            try:
                found = self._agent.get_new_notifs()
            except Exception:
                self.counters["errors"] += 1
                now = self._clock()
                for write in self._writes:
                    if write._suspect_at is None and not self.backend.owned_errors:
                        write._suspect_at = now
                continue
            for agent, messages in found.items():
                for message in messages:
                    self._notices.add(agent, message)
            return

    def _enter(self) -> None:
        """NIXL and UCX use the calling thread's CUDA context."""
        if self._device is not None and self._thread != threading.get_ident():
            import torch

            torch.cuda.set_device(self._device)
            self._thread = threading.get_ident()

    def _quietly(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception:
            self.counters["errors"] += 1


def _rows(address: Longs, length: Longs, device: int) -> npt.NDArray[np.uint64]:
    rows = np.empty((len(address), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = address, length, device
    return rows


def _cuts(length: Longs, most: int, most_bytes: int) -> list[tuple[int, int]]:
    """[start, stop) of each batch."""
    ends = np.cumsum(length)
    cuts, start = [], 0
    while start < len(length):
        before = int(ends[start - 1]) if start else 0
        fits = int(np.searchsorted(ends, before + most_bytes, side="right"))
        stop = min(max(fits, start + 1), start + most, len(length))
        cuts.append((start, stop))
        start = stop
    return cuts
