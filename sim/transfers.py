"""What moving KV cache costs in a run: sizes, descriptors, posting, passes over device memory, and the bytes on the
wires.

Decides no order and no rule: connectors ask for a transfer when the protocol lets them. Ranks move in lockstep, so
one rank of the poster is timed, on the wires of one device of the side with fewer ranks, which carries the most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pushkv.model.timing import (
    device_bytes_per_s,
    flow_bytes_per_s,
    gather_s,
    path_costs,
    post_s,
    scatter_s,
    tail_s,
)
from pushkv.model.timing.fabric import Op
from pushkv.sim.blocks import runs
from pushkv.sim.catalog import Parts
from pushkv.sim.clock import Clock
from pushkv.sim.fabric import Wires
from pushkv.sim.request import Flight
from pushkv.sim.scenario import Scenario
from pushkv.sim.ticks import S_PER_TICK, ticks
from pushkv.sim.trace import ENGINE, TRANSFER

if TYPE_CHECKING:
    from pushkv.sim.trace import TraceWriter

SEGMENT_BYTES = 32 << 20
"""One segment of landing memory: large enough for the wire, small enough that a short prompt does not waste one."""


class Transfers:
    """Costs and wires of one run; ``pair`` names the two engines of a flight."""

    def __init__(
        self,
        env: Clock,
        scenario: Scenario,
        parts: Parts,
        pair: Callable[[Flight], tuple[str, str]],
        trace: TraceWriter | None,
    ) -> None:
        self._env, self._pair, self._trace = env, pair, trace
        self._fabric, self._hardware = parts.fabric, parts.hardware
        self._layers, self._block_size, self._path = parts.shape.layers, scenario.block_size, scenario.path
        self.op: Op = "READ" if scenario.mode == "pull" else "WRITE"
        p, d = scenario.prefill_tp, scenario.decode_tp
        narrow = min(p, d)
        poster = d if scenario.mode == "pull" else p
        self.bytes_per_token = parts.shape.kv_bytes_per_token_rank(narrow)
        """Bytes that one device of the side with fewer ranks sends or receives per token."""
        self._posters = poster
        self._fan = max(p, d) // narrow
        self._each = self._fan if poster == narrow else 1
        self._copies = narrow
        self._p_share, self._d_share = narrow / p, narrow / d
        self.landing_segments = max(1, int(scenario.landing_gib * (1 << 30) // SEGMENT_BYTES))
        self.beside = parts.hardware.beside_layers / parts.shape.layers
        """Part of a step for which a gather waits that passes beside it."""
        self._posts: dict[int, int] = {}
        self._moves: dict[tuple[int, int, bool], tuple[float, int]] = {}
        self._passes: dict[tuple[str, int], int] = {}
        self._paths: dict[int, bool] = {}
        capacity = device_bytes_per_s(self._fabric, self.op)
        self._links: dict[str, tuple[int, int]] = {}
        names = [f"P{i}" for i in range(scenario.prefill)] + [f"D{i}" for i in range(scenario.decode)]
        for name in names:
            self._links[name] = (2 * len(self._links), 2 * len(self._links) + 1)
        self._wires = Wires(env, [capacity] * (2 * len(names)))

    # ------------------------------------------------------------ sizes and choices

    def segments(self, tokens: int) -> int:
        """Segments of landing memory per decode rank for ``tokens`` tokens."""
        return -(-int(tokens * self.bytes_per_token * self._d_share) // SEGMENT_BYTES)

    def parcels(self, tokens: int) -> int:
        """Descriptors that one prefill rank makes for ``tokens`` packed tokens: each pair of ranks has segments of its
        own."""
        pair = tokens * self.bytes_per_token // self._fan
        return -(-pair // SEGMENT_BYTES) * self._each

    def packed(self, tokens: int) -> bool:
        """The path of a prompt of ``tokens`` tokens: packed where it fits the landing memory and costs less than
        posting every block."""
        choice = self._paths.get(tokens)
        if choice is None:
            choice = self._paths[tokens] = self._choose(tokens)
        return choice

    def _choose(self, tokens: int) -> bool:
        if self._path != "auto":
            return self._path == "packed"
        if self.segments(tokens) > self.landing_segments:
            return False
        size = tokens * self.bytes_per_token
        pieces = -(-tokens // self._block_size) * self._layers * self._each
        shares = self._p_share, self._d_share
        return path_costs(self._hardware, self._fabric, size, pieces, self.op, *shares).packed

    def pieces(self, flight: Flight) -> int:
        """Descriptors that one rank of the poster makes when every run of blocks is one; counted when both sides have
        their blocks."""
        p, d = flight.p, flight.d
        if p is None or d is None:
            return 0  # one side has died since
        blocks = -(-flight.input_len // self._block_size)
        return runs(p.blocks, d.blocks, blocks) * self._layers * self._each

    # ------------------------------------------------------------ costs in ticks

    def post(self, flight: Flight, descriptors: int) -> int:
        """Host time of one rank to make and post ``descriptors``; booked on ``flight``."""
        cost = self._posts.get(descriptors)
        if cost is None:
            cost = ticks(post_s(self._fabric, descriptors, 1, self.op, order="allocated"))
            if len(self._posts) < 1 << 16:
                self._posts[descriptors] = cost
        flight.post += cost
        flight.descriptors += descriptors * self._posters
        return cost

    def gather(self, tokens: int) -> int:
        """Device time to pack ``tokens`` tokens on a prefill rank whose engine is at work."""
        return self._pass("gather", gather_s, tokens, self._p_share)

    def scatter(self, tokens: int) -> int:
        """Device time to unpack ``tokens`` tokens on a decode rank whose engine is at work."""
        return self._pass("scatter", scatter_s, tokens, self._d_share)

    def _pass(self, name: str, cost_s: Callable[..., float], tokens: int, share: float) -> int:
        cost = self._passes.get((name, tokens))
        if cost is None:
            cost = ticks(cost_s(self._hardware, tokens * self.bytes_per_token * share, busy=True, fused=True))
            self._passes[name, tokens] = cost
        return cost

    # ------------------------------------------------------------ bytes

    def move(
        self,
        flight: Flight,
        tokens: int,
        descriptors: int,
        posted: int,
        extra: int,
        arrived: Callable[[Any], None],
        handle: Any,
        *,
        packed: bool,
    ) -> None:
        """Bytes of ``tokens`` tokens move from now on, while the host still posts until ``posted``; then
        ``arrived(handle)``.

        The fabric takes its latency, and with scattered descriptors its tail, after the later of the two; whoever
        waits sees it ``extra`` ticks on.
        """
        size = tokens * self.bytes_per_token
        flight.bytes += size * self._copies
        costs = self._moves.get((descriptors, tokens, packed))
        if costs is None:
            cap = flow_bytes_per_s(self._fabric, descriptors, size, self.op, contiguous=packed)
            after_s = self._fabric.latency_s + (0.0 if packed else tail_s(self._fabric, descriptors, self.op))
            costs = (cap, ticks(after_s))
            if len(self._moves) < 1 << 16:
                self._moves[descriptors, tokens, packed] = costs
        p, d = self._pair(flight)
        move = _Move(self, flight, self._env.ticks, posted, costs[1], extra, arrived, handle)
        self._wires.send((self._links[p][0], self._links[d][1]), float(max(size, 1)), costs[0], move.sent)


class _Move:
    """One write or read under way since ``start``, posted until ``posted``."""

    def __init__(
        self,
        transfers: Transfers,
        flight: Flight,
        start: int,
        posted: int,
        after: int,
        extra: int,
        arrived: Callable[[Any], None],
        handle: Any,
    ) -> None:
        self.transfers, self.flight, self.start, self.posted = transfers, flight, start, posted
        self.after, self.extra, self.arrived, self.handle = after, extra, arrived, handle

    def sent(self) -> None:
        """The wires have carried the last byte."""
        transfers, flight = self.transfers, self.flight
        now = transfers._env.ticks
        end = (now if now > self.posted else self.posted) + self.after
        flight.wire += end - self.start
        if transfers._trace is not None:
            self._record(transfers._trace, end)
        transfers._env.call(end + self.extra, self.arrived, self.handle)

    def _record(self, trace: TraceWriter, end: int) -> None:
        transfers, flight = self.transfers, self.flight
        p, d = transfers._pair(flight)
        poster = d if transfers.op == "READ" else p
        start_s, request = self.start * S_PER_TICK, {"request": flight.index}
        thread = f"{poster}/{ENGINE if transfers.op == 'READ' else TRANSFER}"
        trace.span(thread, "post", start_s, self.posted * S_PER_TICK, request)
        trace.span(f"wire/{p}-{d}", transfers.op.lower(), start_s, end * S_PER_TICK, request)
        trace.flow(flight.index, thread, start_s, "t")
        trace.flow(flight.index, f"wire/{p}-{d}", start_s, "t")
