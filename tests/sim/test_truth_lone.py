"""A lone request takes what a person adds up by hand from the profiles, in every mode, to the nanosecond.

The sums below are written from vLLM's order of things (schedule, launch, look, wait), not from the simulator. An
engine with nothing to compute looks again every ``schedule + idle_poll``; what comes in between is seen at the next
look. The cluster is idle, so nothing else adds up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pushkv.model.timing import (
    EngineCost,
    Fabric,
    Hardware,
    ModelShape,
    device_bytes_per_s,
    flow_bytes_per_s,
    gather_s,
    post_s,
    profiles,
    scatter_s,
    tail_s,
)
from pushkv.model.timing.fabric import Op
from pushkv.sim.ticks import ticks

from .worlds import scenario, simulate

BLOCK = 16
BUDGET = 8192


@dataclass
class Sums:
    """One prompt of ``n`` tokens, alone. All times are ticks from its arrival at the API server."""

    n: int
    shape: ModelShape
    hardware: Hardware
    fabric: Fabric
    tp: int

    def __post_init__(self) -> None:
        serving = self.hardware.serving
        self.cost = EngineCost(self.shape, self.hardware, self.tp)
        self.size = self.n * self.shape.kv_bytes_per_token_rank(self.tp)
        self.client_in = ticks(serving.client_in_s) + self.n * ticks(serving.client_in_per_token_s)
        self.client_out = ticks(serving.client_out_s) + self.n * ticks(serving.client_out_per_token_s)
        self.schedule, self.idle = ticks(serving.schedule_s), ticks(serving.idle_poll_s)
        self.period = self.schedule + self.idle
        self.poll = ticks(serving.transfer_poll_s)
        self.message = ticks(self.fabric.message_s)
        base_s, context_s = self.cost.decode_line(1)
        self.decode_launch = ticks(serving.decode_launch_s)
        self.decode = ticks(base_s) + ticks(context_s) * self.n

    def chunks(self) -> list[int]:
        return [min(BUDGET, self.n - done) for done in range(0, self.n, BUDGET)]

    def prefill(self, *, gather: bool = False) -> tuple[list[int], int]:
        """When the device is done with each chunk (``gather``: and has packed it), and when the engine takes note of
        the last one.

        The host launches one chunk after the other, but waits for the last but one; each follows its predecessor on
        the device. After the last launch the scheduler runs once more before the engine looks at results.
        """
        host, free, done = self.client_in, 0, 0
        ends: list[int] = []
        for number, new in enumerate(self.chunks()):
            if number >= 2:
                host = max(host, ends[number - 2])
            launched = host + self.schedule
            ahead_s = max(0, free - launched) * 1e-12
            device_s = self.cost.device_s([(new, done)])
            launch_s = self.cost.launch_s(new)
            free = launched + ticks(self.cost.floor_s(ahead_s + device_s, launch_s))
            ends.append(free)
            if gather:
                free += self.gather(new)
            host = launched + ticks(launch_s)
            done += new
        noted = max(ends[-1], host + self.schedule)
        return [end + self.gather(new) for end, new in zip(ends, self.chunks(), strict=True)] if gather else ends, noted

    def gather(self, tokens: int) -> int:
        return ticks(gather_s(self.hardware, self.size * tokens // self.n, busy=True, fused=True))

    def line(self, name: str) -> int:
        """One of the connector's times that grow with the prompt."""
        serving = self.hardware.serving
        return ticks(getattr(serving, f"{name}_s")) + self.n * ticks(getattr(serving, f"{name}_per_token_s"))

    def blocks(self, op: Op) -> tuple[int, int, int]:
        """Direct: posting, wire, and what the fabric takes after both. A lone request lies in order: one descriptor
        per layer."""
        count = self.shape.layers
        rate = min(
            flow_bytes_per_s(self.fabric, count, self.size, op, contiguous=False), device_bytes_per_s(self.fabric, op)
        )
        after_s = self.fabric.latency_s + tail_s(self.fabric, count, op)
        post = ticks(post_s(self.fabric, count, self.size, op, order="allocated"))
        return post, ticks(self.size / rate), ticks(after_s)

    def segments(self, tokens: int) -> tuple[int, int, int]:
        """Packed: the same for segments of 32 MiB."""
        size = self.size * tokens // self.n
        count = -(-size // (32 << 20))
        rate = flow_bytes_per_s(self.fabric, count, size, "WRITE", contiguous=True)
        post = ticks(post_s(self.fabric, count, size, "WRITE", order="allocated"))
        return post, ticks(size / rate), ticks(self.fabric.latency_s)

    def grid(self, origin: int, at: int) -> int:
        """The first of ``origin``, ``origin + period``, … that is not before ``at``."""
        return origin + max(0, -(-(at - origin) // self.period)) * self.period

    def token(self, admitted: int, scatter: int | None = None) -> int:
        """From the pass that admits the request to its first token at the client. With a scatter the step takes longer
        to prepare, and waits for it on the device."""
        ready = admitted + self.schedule + self.decode_launch
        if scatter is not None:
            ready = max(ready + self.line("prepare"), admitted + self.schedule + self.line("load") + scatter)
        return ready + self.decode + self.client_out


def packed(s: Sums, overlap: str) -> int:
    """Parts leave as they are gathered and share the wire, which does not idle while there are some: the last byte
    comes as if they queued. What leaves whole is planned when the engine has taken note of the prompt."""
    if overlap == "chunk":
        gathered, parts = s.prefill(gather=True)[0], s.chunks()
    else:
        gathered, parts = [s.prefill()[1] + s.line("transfer_start") + s.gather(s.n)], [s.n]
    free = landed = 0
    for at, tokens in zip(gathered, parts, strict=True):
        post, wire, after = s.segments(tokens)
        start = at + s.poll + ticks(s.hardware.serving.part_s)
        free = max(free, start) + wire
        landed = max(start + post, free) + after + s.poll + s.message + ticks(s.hardware.serving.landed_s)
    scatter = ticks(scatter_s(s.hardware, s.size, busy=True, fused=True))
    return s.token(s.grid(s.client_in, landed), scatter)


def direct(s: Sums) -> int:
    """D's loop looks at ``schedule`` after each pass; a report takes effect when the next pass has looked; the one
    after it admits."""
    post, wire, after = s.blocks("WRITE")
    landed = s.prefill()[1] + s.line("transfer_start") + max(post, wire) + after + s.poll + s.message
    seen = s.grid(s.client_in + s.schedule, landed)
    return s.token(seen + s.period + s.idle)


def push(s: Sums) -> int:
    """P's thread posts with the pass after the prefill, P's engine sees the end at a look, D's at a look, and acts on
    it at the next one."""
    noted = s.prefill()[1]
    post, wire, after = s.blocks("WRITE")
    written = noted + s.period + max(post, wire) + after
    told = s.grid(noted, written) + s.message
    heard = s.grid(s.client_in + s.schedule, told)
    return s.token(heard + 2 * s.period + s.idle)


def pull(s: Sums) -> int:
    """The decode leg starts when the prefill leg is over; D's engine thread posts before it looks the first time."""
    arrived = s.prefill()[1] + s.client_out + s.client_in
    post, wire, after = s.blocks("READ")
    start = arrived + s.schedule
    read = start + max(post, wire) + after
    seen = s.grid(start + post, read)
    return s.token(seen + s.period + s.idle)


FORMS: list[tuple[dict[str, str], Callable[[Sums], int]]] = [
    ({"mode": "pushkv", "path": "packed", "overlap": "chunk"}, lambda s: packed(s, "chunk")),
    ({"mode": "pushkv", "path": "packed", "overlap": "none"}, lambda s: packed(s, "none")),
    ({"mode": "pushkv", "path": "direct"}, direct),
    ({"mode": "push"}, push),
    ({"mode": "pull"}, pull),
]


@pytest.mark.parametrize(("way", "form"), FORMS, ids=["-".join(way.values()) for way, _ in FORMS])
@pytest.mark.parametrize("n", [1, 16, 1000, 4096, 8192, 8200, 12_000, 30_000])
@pytest.mark.parametrize(
    ("fabric", "tp", "output_len"), [("nvlink-ucx", 1, 1), ("nvlink-ucx", 2, 50), ("efa-p5en", 1, 9), ("tcp", 4, 2)]
)
def test_ttft_of_a_lone_request_is_the_closed_form(
    way: dict[str, str], form: Callable[[Sums], int], n: int, fabric: str, tp: int, output_len: int
) -> None:
    plan = scenario(
        **way, fabric=fabric, prefill_tp=tp, decode_tp=tp, input_len=n, output_len=output_len, staging_gib=64
    )
    sums = Sums(n, profiles.model(plan.model), profiles.hardware(plan.hardware), profiles.fabric(fabric), tp)
    log = simulate(plan).log
    assert log.milliseconds("ttft")[0] == pytest.approx(form(sums) * 1e-9, abs=1e-6)


@pytest.mark.parametrize("way", [way for way, _ in FORMS], ids=["-".join(way.values()) for way, _ in FORMS])
def test_decoding_of_a_lone_request_is_the_sum_of_its_steps(way: dict[str, str]) -> None:
    """Each further token is one step of the device, whose context has grown by one; the last chunk goes out without
    the prompt's echo."""
    n, out = 2000, 300
    sums = Sums(n, profiles.model("qwen3-8b"), profiles.hardware("h200"), profiles.fabric("nvlink-ucx"), 1)
    log = simulate(scenario(**way, input_len=n, output_len=out)).log
    slope = ticks(sums.cost.decode_line(1)[1])
    steps = sum(sums.decode + slope * k for k in range(1, out))
    echo = n * ticks(sums.hardware.serving.client_out_per_token_s)
    assert log.milliseconds("tpot")[0] * (out - 1) == pytest.approx((steps - echo) * 1e-9, abs=1e-5)


@pytest.mark.parametrize("n", [1, 1000, 8200, 30_000])
def test_the_prefill_leg_is_its_steps_and_the_way_in_and_out(n: int) -> None:
    options: dict[str, Any] = {"input_len": n, "output_len": 5}
    sums = Sums(n, profiles.model("qwen3-8b"), profiles.hardware("h200"), profiles.fabric("nvlink-ucx"), 1)
    for mode in ("pull", "push"):
        log = simulate(scenario(mode=mode, **options)).log
        assert log.milliseconds("prefill")[0] == pytest.approx((sums.prefill()[1] + sums.client_out) * 1e-9, abs=1e-6)
