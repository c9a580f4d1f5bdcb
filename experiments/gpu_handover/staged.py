"""Where D's time goes between landing and first token: the connector with a clock at each hook of vLLM's engine.

    python experiments/gpu_handover/run.py --modes chunk --connector staged:StagedConnector --tokens 1 \\
        --rows open:1024:4:24
    python experiments/gpu_handover/staged.py out/gpu_handover chunk

The first runs the servers with `StagedConnector`, which does what `PushConnector` does and writes one line per
hand-over into ``hooks_MODE_D.jsonl``; the second prints the medians. One-token requests on an idle D, one at a time:
the engine calls `request_finished` as soon as it has the first token. Times are seconds of the monotonic clock;
``gpu_*`` are milliseconds between two events on the stream of the model. Calls of the transfer thread that take longer
than `SLOW_MS` are in ``calls_MODE_*.jsonl``, those within them too; the second command counts them by name.
"""

from __future__ import annotations

import csv
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

try:
    from pushkv.reference.connector import PushConnector, PushMetadata
    from pushkv.reference.ports import IDLE

    NOTHING: Any = PushMetadata(IDLE)
except ImportError:  # the report needs no vLLM
    PushConnector = object  # type: ignore[assignment, misc]

SLOW_MS = 8.0
HOOKS = (
    ("landed", "D's transfer thread has all"),
    ("passed", "the pass before ends: the engine had not heard of it"),
    ("heard", "the scheduler asks, and hears"),
    ("allocated", "vLLM has given it blocks"),
    ("metadata", "the pass ends"),
    ("asked", "the scatter is asked for"),
    ("executing", "the model runner calls its first hook"),
    ("loading", "and asks for the load: inputs are prepared"),
    ("joined", "the forward may come behind the scatter"),
    ("enqueued", "the forward is enqueued"),
    ("finished", "the engine has the first token"),
    ("token", "the client has it"),
)


def timed(label: str, call: Callable[..., Any], file: Any) -> Callable[..., Any]:
    """``call``, and a line in ``file`` when it was slow."""

    def around(*arguments: Any, **named: Any) -> Any:
        begun = time.monotonic()
        try:
            return call(*arguments, **named)
        finally:
            took_ms = 1e3 * (time.monotonic() - begun)
            if took_ms > SLOW_MS:
                file.write(json.dumps({"call": label, "at_s": begun, "ms": round(took_ms, 2)}) + "\n")
                file.flush()

    return around


class StagedConnector(PushConnector):
    """`PushConnector` with a clock at its hooks. The two sides share what they write: they share a process at TP1."""

    _line: ClassVar[dict[str, float]] = {}
    _passed = 0.0
    _marks: ClassVar[list[Any]] = []
    _file: Any = None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None and self._worker.rank is not None
        rank: Any = self._worker.rank
        calls = self._beside("calls")
        for owner, names in (
            (rank, ("turn", "step", "_read", "_sleep")),
            (rank.sending, ("poll", "pack", "post", "enqueued", "_start", "_place")),
            (rank.sending.copier, ("gather",)),
            (rank.landing, ("poll", "load", "plan_ahead", "heard")),
            (rank.landing.copier, ("scatter", "scatter_ahead", "prepare")),
            (rank.transport, ("post", "poll", "progress", "release")),
            (rank.channel, ("receive", "send")),
        ):
            for name in names:
                if hasattr(owner, name):
                    label = f"{type(owner).__name__}.{name}"
                    setattr(owner, name, timed(label, getattr(owner, name), calls))
        begun: list[float] = []

        def collected(phase: str, found: dict[str, int]) -> None:
            """Of Python's garbage collector, on whatever thread it runs."""
            if phase == "start":
                begun[:] = [time.monotonic()]
            elif begun and (took_ms := 1e3 * (time.monotonic() - begun[0])) > SLOW_MS:
                label = f"gc of generation {found['generation']} on {threading.current_thread().name}"
                calls.write(json.dumps({"call": label, "at_s": begun[0], "ms": round(took_ms, 2)}) + "\n")

        gc.callbacks.append(collected)

    def _beside(self, name: str) -> Any:
        """A file beside the records."""
        path = Path(self._setup.settings.records or "records")
        return path.with_name(path.name.replace("records", name)).open("a", encoding="utf-8")

    def _at(self, name: str) -> None:
        StagedConnector._line.setdefault(name, time.monotonic())

    def _mark(self) -> None:
        import torch

        if not torch.cuda.is_available():
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        StagedConnector._marks.append(event)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0]:
            StagedConnector._line = {"passed": StagedConnector._passed}
            StagedConnector._marks = []
            self._at("heard")
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._at("allocated")
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._at("metadata")
        metadata = super().build_connector_meta(scheduler_output)
        StagedConnector._passed = time.monotonic()
        return metadata

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        orders = kv_connector_metadata.orders
        if orders.load or orders.begun:
            self._at("executing")
            self._mark()
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._at("loading")
        super().start_load_kv(forward_context, **kwargs)
        self._at("joined")
        if len(StagedConnector._marks) == 1:
            self._mark()

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self._at("enqueued")
        if len(StagedConnector._marks) == 2:
            self._mark()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._at("finished")
        line, marks = StagedConnector._line, StagedConnector._marks
        if "heard" in line and "joined" in line:
            for name, first, last in zip(("gpu_scatter_ms", "gpu_forward_ms"), marks, marks[1:], strict=False):
                if last.query():
                    line[name] = first.elapsed_time(last)
            if StagedConnector._file is None:
                StagedConnector._file = self._beside("hooks")
            StagedConnector._file.write(json.dumps(line) + "\n")
            StagedConnector._file.flush()
            StagedConnector._line = {}
        return super().request_finished_all_groups(request, block_ids)


class BareConnector(PushConnector):
    """`PushConnector` of which the engine's thread is asked nothing in a step, but everything else runs."""

    def on_new_request(self, request: Any) -> None:
        return

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return NOTHING

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    def has_pending_push_work(self) -> bool:
        return False

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        return

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def get_kv_connector_stats(self) -> Any:
        return None


class EmptyConnector(BareConnector):
    """A connector that has no rank either: no transfer thread, no NIXL agent, no memory of its own."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        return

    def get_handshake_metadata(self) -> Any:
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        return


def report(folder: Path, mode: str) -> None:
    """Prints what ``mode`` has left in ``folder``."""
    with (folder / "requests.csv").open(encoding="utf-8") as file:
        served = [
            line for line in csv.DictReader(file) if line["mode"] == mode and line["landed_ms"] and line["ttft_ms"]
        ]
    report_hooks(mode, served, lines_of(folder / f"hooks_{mode}_D.jsonl"))
    for name in "PD":
        slow: dict[str, list[float]] = {}
        for call in lines_of(folder / f"calls_{mode}_{name}.jsonl"):
            if call["call"] != "Rank._sleep" or call["ms"] > 1100:  # it may sleep for a second
                slow.setdefault(call["call"], []).append(call["ms"])
        print(f"{mode}, calls of {name}'s transfer thread above {SLOW_MS:.0f} ms: number, median, longest")
        for label, values in sorted(slow.items(), key=lambda item: -max(item[1])):
            print(f"  {len(values):6} {statistics.median(values):8.1f} {max(values):8.1f}  {label}")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines that may be missing."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def by_row(served: list[dict[str, str]], hooks: list[dict[str, float]]) -> dict[str, list[dict[str, float]]]:
    """Row of the load -> its hand-overs: each stage in milliseconds from landing."""
    rows: dict[str, list[dict[str, float]]] = {}
    for line in served:
        zero = float(line["sent_s"]) + float(line["prefill_ms"]) / 1e3
        landed, asked = (zero + float(line[name]) / 1e3 for name in ("landed_ms", "asked_ms"))
        token = float(line["sent_s"]) + float(line["ttft_ms"]) / 1e3
        mine = [hook for hook in hooks if landed < hook["heard"] < token and hook["finished"] < token]
        if len(mine) != 1:
            continue
        known = {name: when for name, when in mine[0].items() if not name.startswith("gpu_")}
        known |= {"landed": landed, "asked": asked, "token": token}
        each = {name: 1e3 * (when - landed) for name, when in known.items()}
        each |= {name: value for name, value in mine[0].items() if name.startswith("gpu_")}
        rows.setdefault(line["row"], []).append(each)
    return rows


def report_hooks(mode: str, served: list[dict[str, str]], hooks: list[dict[str, float]]) -> None:
    """Medians, P90 and largest of each stage, from landing, per row of the load."""
    for row, found in by_row(served, hooks).items():
        print(f"{mode} {row}: {len(found)} hand-overs, ms from landing: median, P90, largest; since the line before")
        before = 0.0
        for name, says in (*HOOKS, ("gpu_scatter_ms", "on the GPU"), ("gpu_forward_ms", "on the GPU")):
            values = sorted(each[name] for each in found if name in each)
            if values:
                middle, high = statistics.median(values), values[int(0.9 * len(values))]
                since = "" if name.startswith("gpu_") else f"{middle - before:+6.2f}"
                print(f"  {middle:7.2f} {high:7.2f} {values[-1]:7.2f} {since:>7}  {name}: {says}")
                before = middle


if __name__ == "__main__":
    report(Path(sys.argv[1]), sys.argv[2])
