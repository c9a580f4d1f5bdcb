"""The command ``pushkv``.

Decides flags, where output goes and exit codes: 0 done, 1 a check failed, 2 bad input (one line on stderr), 130
interrupted, 141 nobody reads stdout any more. The flags of a scenario are made from the table in
`pushkv.sim.scenario`; what a command does is elsewhere.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from pushkv.sim import report, scenario
from pushkv.sim.errors import BadInput, unknown
from pushkv.sim.explore import command as exploration
from pushkv.sim.output import check_writable, emit, write_text
from pushkv.sim.progress import progress_bar
from pushkv.sim.requests_out import check_requests_out, write_requests
from pushkv.sim.scenario import MODES, Scenario, Setting
from pushkv.sim.trace import TraceWriter

__all__ = ["main"]

_EXIT_FAILED_CHECK = 1
_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. For bad input one line goes to stderr, and never a traceback."""
    try:
        options = _parser().parse_args(argv)
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except BadInput as error:
        print(f"pushkv: error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("pushkv: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; keep the interpreter from complaining when it flushes at exit.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE


# ---- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Where the results of one command go."""

    json: str | None
    requests: str | None
    trace: str | None
    progress: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> _Outputs:
        """The outputs that were asked for. Raises `BadInput` for one that cannot be written, before a long run."""
        made = cls(options.json, options.requests_out, options.trace_out, not options.no_progress)
        for flag, path in (("--json", made.json), ("--requests-out", made.requests), ("--trace-out", made.trace)):
            if path is not None and path != "-":
                check_writable(flag, path)
        paths = [path for path in (made.json, made.requests, made.trace) if path not in (None, "-")]
        if len(set(paths)) < len(paths):
            raise BadInput("--json, --requests-out and --trace-out name the same file; give each its own")
        if made.requests is not None:
            check_requests_out(made.requests)
        return made

    def beside(self, mode: str) -> _Outputs:
        """The same with the mode's name in the files of which there is one per mode."""

        def named(path: str | None) -> str | None:
            return path and str(Path(path).with_suffix(f".{mode}{Path(path).suffix}"))

        return _Outputs(self.json, named(self.requests), named(self.trace), self.progress)


def _simulate(options: argparse.Namespace) -> int:
    outputs = _Outputs.of(options)
    doc = _run(scenario.load(options.scenario, _flags(options)), outputs)
    emit(outputs.json, doc, report.simulate(doc))
    return 0


def _compare(options: argparse.Namespace) -> int:
    outputs = _Outputs.of(options)
    flags = _flags(options)
    modes = (flags.pop("mode") or ",".join(MODES)).split(",")
    for mode in modes:
        if mode not in MODES:
            raise unknown("--mode", mode, MODES, also="(or several, with commas)")
    if len(set(modes)) < len(modes):
        raise BadInput(f"--mode {','.join(modes)} names a mode twice; name each once")
    plans = [scenario.load(options.scenario, {**flags, "mode": mode}, lenient=True) for mode in modes]
    docs = [_run(plan, outputs.beside(plan.mode)) for plan in plans]
    emit(outputs.json, report.documents(docs), report.compare(docs))
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from pushkv.sim import calibration

    for flag, path in (("--json", options.json), ("--out", options.out)):
        if path is not None and path != "-":
            check_writable(flag, path)
    if options.out == "-" and options.json == "-":
        raise BadInput("--out - and --json - both want stdout; give one of them a file")
    fitted = calibration.fit(
        options.table,
        options.hardware,
        model=options.model,
        tp=_whole("--tp", options.tp),
        budget=_whole("--token-budget", options.token_budget),
        name=options.name,
    )
    if options.out == "-":
        print(fitted.toml, end="")
        return 0
    if options.out is not None:
        write_text("--out", options.out, fitted.toml)
    emit(options.json, {"schema": report.SCHEMA, **fitted.document()}, report.calibrate(fitted.residuals))
    return 0


def _validate(options: argparse.Namespace) -> int:
    from pushkv.sim import validate

    if options.json not in (None, "-"):
        check_writable("--json", options.json)
    with progress_bar("validate", wanted=not options.no_progress) as progress:
        found = validate.run(options.data, progress=progress)
    emit(options.json, found.document(), report.validate(found))
    return 0 if found.passed else _EXIT_FAILED_CHECK


def _bench_transfer(options: argparse.Namespace) -> int:
    from pushkv.reference import bench_transfer

    for flag, path in (("--json", options.json), ("--csv", options.csv)):
        if path not in (None, "-"):
            check_writable(flag, path)
    if options.json == options.csv == "-":
        raise BadInput("--json - and --csv - both mean stdout; give one of them a file")
    try:
        request = bench_transfer.Request(
            backend=options.backend,
            device=options.device,
            layout=options.layout,
            tokens=tuple(_whole("--tokens", value) for value in options.tokens.split(",")),
            runs=tuple(0 if run == "all" else _whole("--runs", run) for run in options.runs.split(",")),
            layers=_whole("--layers", options.layers),
            segment_bytes=_whole("--segment-bytes", options.segment_bytes),
            repeats=_whole("--repeats", options.repeats),
        )
        found = bench_transfer.run(request, lambda text: print(text, file=sys.stderr))
    except bench_transfer.BenchError as error:
        raise BadInput(str(error)) from None
    if options.csv not in (None, "-"):
        write_text("--csv", options.csv, bench_transfer.to_csv(found))
    if options.csv == "-":
        print(bench_transfer.to_csv(found), end="")
    else:
        emit(options.json, found, report.table(bench_transfer.table_rows(found)))
    return 0 if all(row["bytes_equal"] for row in found["rows"]) else _EXIT_FAILED_CHECK


def _router(options: argparse.Namespace) -> int:
    from pushkv.router import command, settings

    flags = {name: getattr(options, name) for name in ("listen", "mode", "dispatch", "policy")}
    for kind in ("prefill", "decode"):
        given = getattr(options, kind)
        flags[kind] = given and [settings.parse_server(kind, text) for text in given]
    return command.run(command.Source(options.config, flags), check=options.check)


def _doctor(options: argparse.Namespace) -> int:
    from pushkv.router import doctor

    if options.json not in (None, "-"):
        check_writable("--json", options.json)
    findings = doctor.examine(doctor.parse(options))
    emit(options.json, doctor.document(findings), doctor.text(findings))
    return _EXIT_FAILED_CHECK if any(one.level == "error" for one in findings) else 0


def _whole(flag: str, value: str) -> int:
    return int(Setting("", kind="whole").parse(flag, value))


def _run(plan: Scenario, outputs: _Outputs) -> dict[str, Any]:
    from pushkv.sim import world

    trace = TraceWriter() if outputs.trace else None
    with progress_bar(plan.mode, wanted=outputs.progress) as progress:
        result = world.run(plan, progress=progress, trace=trace)
    if outputs.requests:
        write_requests(result.log, outputs.requests)
    if trace is not None and outputs.trace:
        trace.write(outputs.trace)
    return report.document(result)


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in scenario.settings()}


# ---- flags ---------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse, but an error is one line."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (try {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pushkv",
        description="Predict what push, pull and pushkv do to the latency of a disaggregated LLM cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pushkv {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _scenario_command(commands, "simulate", _simulate, "predict one cluster in one mode")
    _scenario_command(commands, "compare", _compare, "the modes side by side, with the same arrivals")
    _calibrate_command(commands)
    _validate_command(commands)
    _bench_transfer_command(commands)
    _router_command(commands)
    _doctor_command(commands)
    exploration.add_commands(commands)
    return parser


def _calibrate_command(commands: Any) -> None:
    help = "fit a hardware profile, or a fabric's posting constants, to measurements"
    parser = commands.add_parser("calibrate", help=help, description=help.capitalize() + ".", allow_abbrev=False)
    parser.set_defaults(command=_calibrate)
    parser.add_argument(
        "table",
        metavar="TABLE.csv",
        help="engine steps (model,kind,batch,context_or_input_len,ms) or transfers"
        " (op,pattern,desc_bytes,descs,make_us,post_us)",
    )
    parser.add_argument("--hardware", metavar="NAME", default=_DEFAULT.hardware, help="profile to start from")
    parser.add_argument("--model", metavar="NAME", help="the model measured, if its name in the table is not built in")
    parser.add_argument("--tp", metavar="N", default="1", help="tensor-parallel ranks measured (default: 1)")
    parser.add_argument("--token-budget", metavar="N", default="8192", help="tokens of a step at most (default: 8192)")
    parser.add_argument("--name", metavar="NAME", default="fitted", help="name of the calibration (default: fitted)")
    parser.add_argument(
        "--out",
        metavar="FILE.toml|-",
        help="write the hardware profile (or a fabric's posting tables); - is stdout",
    )
    parser.add_argument("--json", metavar="FILE|-", help="write JSON; - is stdout, which then holds nothing else")


def _validate_command(commands: Any) -> None:
    help = "predictions beside measurements, with the error of each"
    parser = commands.add_parser("validate", help=help, description=help.capitalize() + ".", allow_abbrev=False)
    parser.set_defaults(command=_validate)
    parser.add_argument("--data", metavar="FOLDER", help="measurements (default: those of the project)")
    parser.add_argument("--json", metavar="FILE|-", help="write JSON; - is stdout, which then holds nothing else")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar on stderr")


def _bench_transfer_command(commands: Any) -> None:
    help = "direct against packed writes between two processes on this machine, over real NIXL"
    parser = commands.add_parser("bench-transfer", help=help, description=help.capitalize() + ".", allow_abbrev=False)
    parser.set_defaults(command=_bench_transfer)
    for flag, metavar, default, text in (
        ("backend", "UCX|LIBFABRIC", "UCX", "NIXL's backend"),
        ("device", "cpu|cuda", "cpu", "where the caches lie; cuda takes two devices"),
        ("layout", "apart|interleaved", "apart", "K and V of a block"),
        ("tokens", "N,...", "1024,4096", "sizes of the prompt"),
        ("runs", "N,...", "1,4,16,all", "blocks that follow each other in memory"),
        ("layers", "N", "8", "layers, of 8 KV heads of 128 bfloat16 each"),
        ("segment-bytes", "N", str(2 << 20), "segments of staging and landing memory"),
        ("repeats", "N", "5", "measurements of which the median is shown"),
    ):
        parser.add_argument(f"--{flag}", metavar=metavar, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--json", metavar="FILE|-", help="write JSON; - is stdout, which then holds nothing else")
    parser.add_argument("--csv", metavar="FILE|-", help="write CSV that `pushkv calibrate` reads; - is stdout")


def _router_command(commands: Any) -> None:
    help = "one OpenAI-compatible address for several prefill and decode servers"
    parser = commands.add_parser("router", help=help, description=help.capitalize() + ".", allow_abbrev=False)
    parser.set_defaults(command=_router)
    parser.add_argument("--config", metavar="FILE.toml", help="all settings and the server list; flags win over it")
    parser.add_argument(
        "--prefill",
        metavar="URL[=ENGINE_ID@HOST:PORT]",
        action="append",
        help="a prefill server, and where its connector is; may be repeated",
    )
    parser.add_argument("--decode", metavar="URL", action="append", help="a decode server; may be repeated")
    parser.add_argument("--listen", metavar="HOST:PORT", help="default: 127.0.0.1:8100")
    parser.add_argument("--mode", metavar="push|pull", help="what the engines' connector does (default: push)")
    parser.add_argument("--dispatch", metavar="parallel|sequential", help="of push (default: parallel)")
    parser.add_argument("--policy", metavar="round-robin|least-tokens|session|prefix", help="default: least-tokens")
    parser.add_argument("--check", action="store_true", help="print the settings and end")


def _doctor_command(commands: Any) -> None:
    help = "what is wrong on an engine's machine, and what to do about it"
    parser = commands.add_parser("doctor", help=help, description=help.capitalize() + ".", allow_abbrev=False)
    parser.set_defaults(command=_doctor)
    parser.add_argument("--kv-transfer-config", metavar="JSON", help="as vLLM is started with; PUSHKV_* wins over it")
    parser.add_argument("--role", metavar="prefill|decode|both", default="both", help="of the engine (default: both)")
    parser.add_argument("--tp", metavar="N", default="1", help="its tensor-parallel ranks (default: 1)")
    parser.add_argument("--peer", metavar="HOST:PORT", action="append", help="another engine's side channel")
    parser.add_argument("--server", metavar="URL", action="append", help="a vLLM server; several are compared")
    parser.add_argument("--json", metavar="FILE|-", help="write JSON; - is stdout, which then holds nothing else")


def _scenario_command(commands: Any, name: str, command: Any, help: str) -> None:
    parser = commands.add_parser(name, help=help, description=help.capitalize() + ".", allow_abbrev=False)
    parser.set_defaults(command=command)
    parser.add_argument("--scenario", metavar="FILE.toml", help="settings in a file; flags win over it")
    groups: dict[str, Any] = {}
    defaults = {f: getattr(_DEFAULT, f) for f in scenario.settings()}
    for field, setting in scenario.settings().items():
        group = groups.setdefault(setting.group, None) or parser.add_argument_group(setting.group)
        groups[setting.group] = group
        text = setting.help if defaults[field] is None else f"{setting.help} (default: {defaults[field]})"
        metavar = "|".join(setting.choices) or {"whole": "N", "number": "X", "file": "FILE"}.get(setting.kind, "NAME")
        if name == "compare" and field == "mode":
            text, metavar = "modes to compare, with commas (default: all)", "MODE,..."
        group.add_argument("--" + field.replace("_", "-"), dest=field, metavar=metavar, help=text.replace("%", "%%"))
    _output_flags(parser.add_argument_group("output"))


_DEFAULT = Scenario()


def _output_flags(group: Any) -> None:
    group.add_argument("--json", metavar="FILE|-", help="write JSON; - is stdout, which then holds nothing else")
    group.add_argument("--requests-out", metavar="F.csv|F.parquet", help="write one row per request")
    group.add_argument("--trace-out", metavar="F.json", help="write a trace for https://ui.perfetto.dev")
    group.add_argument("--no-progress", action="store_true", help="no progress bar on stderr")


def _version() -> str:
    try:
        return version("pushkv")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0"


if __name__ == "__main__":
    sys.exit(main())
