"""The command line: exit codes, one line for bad input, JSON alone on stdout, no traceback ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pushkv.sim
from pushkv.sim import cli, report
from pushkv.sim.report import Check, Validation

CONFIG = '{"hidden_size": 4096, "num_attention_heads": 32}'
HEAD = "arrival_s,input_len,output_len\n"


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of broken files; the test runs inside it."""
    for name, text in {
        "broken.toml": "qps = [",
        "typo.toml": "qsp = 1\n",
        "nan.toml": "qps = nan\n",
        "config.json": CONFIG,
        "broken.json": "{",
        "unsorted.csv": HEAD + "1,10,10\n0,10,10\n",
        "negative.csv": HEAD + "0,-10,10\n",
        "empty.csv": HEAD,
        "columns.csv": "a,b\n1,2\n",
        "faults.toml": '[[fault]]\nkind = "fire"\n',
        "table.csv": "model,kind,batch,context_or_input_len,ms\nqwen3-8b,prefill,1,1024,fast\n",
        "unknown.csv": "model,kind,batch,context_or_input_len,ms\nqwen9,prefill,1,1024,5\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


BAD_INPUT = [
    ("simulate --hardware h20", "did you mean 'h200'"),
    ("simulate --mode pushed", "choose from pull, push, pushkv"),
    ("simulate --fabric ethernet", "--fabric 'ethernet' is not known"),
    ("simulate --model gpt-2", "or a path to config.json"),
    ("simulate --calibration best", "--calibration 'best' is not known"),
    ("simulate --prefill-tp 3", "--prefill-tp 3 does not divide the heads"),
    ("simulate --decode-tp 64", "--decode-tp 64 does not divide the heads"),
    ("simulate --qps -1", "--qps -1 is not possible: expected a number above 0"),
    ("simulate --qps nan", "--qps nan is not possible"),
    ("simulate --qps=-inf", "--qps -inf is not possible"),
    ("simulate --requests 0", "--requests 0 is not possible: expected a whole number from 1 up"),
    ("simulate --scenario broken.toml", "broken.toml is not TOML"),
    ("simulate --scenario absent.toml", "absent.toml cannot be read"),
    ("simulate --scenario typo.toml", "did you mean 'qps'"),
    ("simulate --scenario nan.toml", "nan.toml: qps nan is not possible"),
    ("simulate --scenario .", "cannot be read: Is a directory"),
    ("simulate --model config.json", "num_hidden_layers is missing"),
    ("simulate --model broken.json", "is not JSON"),
    ("simulate --arrival trace --trace unsorted.csv", "unsorted.csv line 3"),
    ("simulate --arrival trace --trace negative.csv", "negative.csv line 2"),
    ("simulate --arrival trace --trace empty.csv", "empty.csv has no rows"),
    ("simulate --arrival trace --trace columns.csv", "expected arrival_s,input_len,output_len"),
    ("simulate --arrival trace --trace absent.csv", "absent.csv cannot be read"),
    ("simulate --model llama-3.3-70b", "use --prefill-tp"),
    ("simulate --faults faults.toml", "kind 'fire' is not known"),
    ("simulate --requests-out r.xls", "use .csv or .parquet"),
    ("simulate --trace-out absent/t.json", "the folder absent does not exist"),
    ("simulate --json .", "is a folder; name a file"),
    ("simulate --bogus", "unrecognized arguments: --bogus"),
    ("simulate --qps", "expected one argument"),
    ("simulate --mod pull", "unrecognized arguments: --mod"),
    ("compare --mode pull,pulk", "--mode 'pulk' is not known: did you mean 'pull'?"),
    ("compare --decode-tp 3", "--decode-tp 3 does not divide the heads"),
    ("calibrate absent.csv", "absent.csv cannot be read"),
    ("calibrate columns.csv", "for engine steps or"),
    ("calibrate table.csv", "table.csv: row 1: ms is 'fast'"),
    ("calibrate unknown.csv", "model 'qwen9' is not known: did you mean"),
    ("calibrate table.csv --tp 0", "--tp 0 is not possible"),
    ("calibrate table.csv --out - --json -", "both want stdout"),
    ("divine", "invalid choice: 'divine'"),
    ("", "required: COMMAND"),
]


@pytest.mark.usefixtures("bad", "fake_world")
@pytest.mark.parametrize(("line", "names"), BAD_INPUT, ids=[line or "nothing" for line, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_exit_2(line: str, names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pushkv: error: ")
    assert err.count("\n") == 1
    assert names in err


def process(line: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pushkv.sim.cli", *line.split()], capture_output=True, text=True, check=False, **more
    )


@pytest.mark.parametrize(
    "line",
    [
        "simulate --qps nan",
        "simulate --scenario broken.toml",
        "simulate --model config.json",
        "simulate --decode-tp 3",
        "simulate --bogus",
        "calibrate table.csv",
    ],
)
def test_bad_input_in_a_process_of_its_own(bad: Path, line: str) -> None:
    done = process(line, cwd=bad)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pushkv: error: ")
    assert done.stderr.count("\n") == 1


def test_help_lists_the_commands_that_exist() -> None:
    done = process("--help")
    assert done.returncode == 0
    predicting = ("simulate", "compare", "calibrate", "validate")
    for command in (*predicting, "explore", "replay", "bench-transfer", "router", "doctor"):
        assert command in done.stdout
    for later in ("sweep", "advise"):
        assert later not in done.stdout
    assert process("--version").stdout.startswith("pushkv ")


# ---- what a run prints ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_world")
def test_json_on_stdout_is_one_document_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--requests", "5", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["summary"]["requests"] == 5
    assert err == ""
    assert cli.main(["compare", "--requests", "5", "--json", "-"]) == 0
    doc = json.loads(capsys.readouterr().out)
    assert [run["scenario"]["mode"] for run in doc["runs"]] == ["pull", "push", "pushkv"]
    assert [run["scenario"]["path"] for run in doc["runs"]] == ["direct", "direct", "auto"]


@pytest.mark.usefixtures("fake_world")
def test_tables_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        flag: str(tmp_path / name)
        for flag, name in (("json", "r.json"), ("requests-out", "r.csv"), ("trace-out", "t.json"))
    }
    argv = [word for flag, path in files.items() for word in (f"--{flag}", path)]
    assert cli.main(["simulate", "--requests", "5", *argv]) == 0
    out = capsys.readouterr().out
    assert "time to first token, ms" in out
    assert json.loads(Path(files["json"]).read_text())["schema"] == 1
    assert len(Path(files["requests-out"]).read_text().splitlines()) == 6
    assert json.loads(Path(files["trace-out"]).read_text())["traceEvents"]


@pytest.mark.usefixtures("fake_world")
def test_compare_chooses_modes_and_names_files_by_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "--requests", "4", "--mode", "push,pushkv", "--path", "packed"]
    assert cli.main([*argv, "--requests-out", str(tmp_path / "r.csv")]) == 0
    assert "0.50×" not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.push.csv", "r.pushkv.csv"]


def test_the_same_seed_prints_the_same_json(fake_world: None, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert cli.main(["simulate", "--requests", "50", "--seed", "3", "--json", "-"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


# ---- calibrate and validate ----------------------------------------------------------------------------------------

ENGINE = """model,kind,batch,context_or_input_len,ms
qwen3-8b,prefill,1,1024,43.17
qwen3-8b,prefill,1,4096,109.8
qwen3-8b,prefill,1,16384,518.1
qwen3-8b,decode_step,1,128,5.23
qwen3-8b,decode_step,32,1024,6.75
qwen3-8b,decode_step,32,4096,9.78
"""


def test_calibrate_writes_a_profile_that_simulate_reads(
    tmp_path: Path, fake_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    table, profile = tmp_path / "engine.csv", tmp_path / "fitted.toml"
    table.write_text(ENGINE)
    assert cli.main(["calibrate", str(table), "--out", str(profile)]) == 0
    assert "6 rows: root mean square error" in capsys.readouterr().out
    assert cli.main(["simulate", "--hardware", str(profile), "--requests", "2", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"]["hardware"] == str(profile)
    assert cli.main(["calibrate", str(table), "--out", "-"]) == 0
    assert capsys.readouterr().out == profile.read_text()
    assert cli.main(["calibrate", str(table), "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["residuals"]) == 6


def test_calibrate_a_model_by_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "engine.csv"
    table.write_text(ENGINE.replace("qwen3-8b", "mine"))
    assert cli.main(["calibrate", str(table)]) == 2
    assert cli.main(["calibrate", str(table), "--model", "qwen3-8b"]) == 0


@pytest.mark.parametrize(("predicted", "code"), [(101.0, 0), (150.0, 1)])
def test_validate_exits_1_when_a_check_fails(
    predicted: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fake:
        @staticmethod
        def run(data: str | None, *, progress: object = None) -> Validation:
            assert data is None
            return Validation((Check("in-sample", "TTFT", "ms", 100.0, predicted, 0.1),), {"a.csv": "ab" * 32})

    monkeypatch.setitem(sys.modules, "pushkv.sim.validate", Fake)  # type: ignore[arg-type]
    monkeypatch.setattr(pushkv.sim, "validate", Fake, raising=False)
    assert cli.main(["validate"]) == code
    assert ("MISS" in capsys.readouterr().out) == bool(code)
    assert cli.main(["validate", "--json", "-"]) == code
    assert json.loads(capsys.readouterr().out)["passed"] == (code == 0)


# ---- interruptions -------------------------------------------------------------------------------------------------


def test_ctrl_c_is_exit_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["simulate"]) == 130
    assert capsys.readouterr().err == "pushkv: interrupted\n"


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    table = tmp_path / "engine.csv"
    table.write_text(ENGINE)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "pushkv.sim.cli", "calibrate", str(table)],
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_width_of_the_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(report.WIDTH))
    for command in ("simulate", "compare", "calibrate", "validate", "explore", "replay"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= report.WIDTH
