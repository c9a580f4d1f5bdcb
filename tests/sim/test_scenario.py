"""Settings: their layers, and every input that is refused with one line that names it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pushkv.model.timing import profiles
from pushkv.sim import catalog
from pushkv.sim.errors import BadInput
from pushkv.sim.scenario import MODES, Fault, load, settings


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(file: str | None = None, /, **flags: Any) -> str:
    with pytest.raises(BadInput) as caught:
        load(file, flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- layers --------------------------------------------------------------------------------------------------------


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "s.toml", 'qps = 3\ninput-len = 500\nmode = "pull"\n')
    got = load(path, {"qps": "4", "seed": None})
    assert (got.qps, got.input_len, got.mode, got.output_len, got.seed) == (4.0, 500, "pull", 128, 0)


def test_defaults_are_those_of_vllm() -> None:
    got = load()
    assert (got.block_size, got.token_budget, got.max_num_seqs, got.gpu_memory_utilization) == (16, 8192, 128, 0.9)
    assert (got.prefill, got.decode, got.requests) == (1, 1, 1000)


@pytest.mark.parametrize(
    ("mode", "router", "path", "overlap"),
    [
        ("pull", "sequential", "direct", "none"),
        ("push", "concurrent", "direct", "none"),
        ("pushkv", "concurrent", "auto", "chunk"),
    ],
)
def test_what_follows_from_the_mode(mode: str, router: str, path: str, overlap: str) -> None:
    got = load(None, {"mode": mode})
    assert (got.router, got.path, got.overlap) == (router, path, overlap)
    assert load(None, {"mode": mode, "router": "sequential"}).router == "sequential"


def test_a_scenario_in_a_report_can_be_run_again(tmp_path: Path) -> None:
    first = load(None, {"qps": "2.5", "prefill": "2", "mode": "push"})
    lines = [f"{key} = {json.dumps(value)}" for key, value in first.as_json().items() if value not in (None, [])]
    assert load(write(tmp_path / "again.toml", "\n".join(lines))) == first
    assert json.loads(json.dumps(first.as_json())) == first.as_json()


def test_every_packaged_name_loads() -> None:
    for fabric in profiles.names("fabric"):
        assert load(None, {"fabric": fabric}).fabric == fabric
    for model in profiles.names("models"):
        assert load(None, {"model": model, "prefill_tp": 8, "decode_tp": 8}).model == model


# ---- single values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mode", "path", "overlap", "router", "arrival", "model", "hardware", "fabric", "calibration"]
)
def test_an_unknown_name_is_refused_with_the_list(name: str) -> None:
    message = refused(**{name: "nonesuch"})
    assert f"--{name} 'nonesuch' is not known: " in message
    assert "choose from " in message


@pytest.mark.parametrize(
    ("name", "typed", "meant"),
    [
        ("model", "qwen3-8", "qwen3-8b"),
        ("hardware", "H20", "h200"),
        ("fabric", "nvlink", "nvlink-ucx"),
        ("mode", "pushkw", "pushkv"),
    ],
)
def test_the_closest_match_is_named(name: str, typed: str, meant: str) -> None:
    assert f"did you mean {meant!r}?" in refused(**{name: typed})


@pytest.mark.parametrize(
    "value", ["-1", "0", "nan", "inf", "-inf", "fast", "", -1, math.nan, math.inf, True, None.__class__]
)
def test_a_rate_must_be_a_number_above_zero(value: Any) -> None:
    assert refused(qps=value).endswith("is not possible: expected a number above 0")


@pytest.mark.parametrize("name", [n for n, s in settings().items() if s.kind == "whole" and n != "seed"])
@pytest.mark.parametrize("value", ["0", "-3", "1.5", "nan", "1e3", 1.5, math.nan, True])
def test_a_count_must_be_a_whole_number_from_one(name: str, value: Any) -> None:
    assert refused(**{name: value}) == (
        f"--{name.replace('_', '-')} {value} is not possible: expected a whole number from 1 up"
    )


def test_limits_on_both_sides() -> None:
    assert "expected a number above 0 to 1" in refused(gpu_memory_utilization="1.1")
    assert "expected a number from 0 to 1" in refused(prefill_cached_fraction="-0.1")
    assert load(None, {"prefill_cached_fraction": "0"}).prefill_cached_fraction == 0.0
    assert load(None, {"seed": "0"}).seed == 0


# ---- files ---------------------------------------------------------------------------------------------------------


def test_scenario_files(tmp_path: Path) -> None:
    assert "absent.toml cannot be read: No such file" in refused(str(tmp_path / "absent.toml"))
    assert "b.toml is not TOML" in refused(write(tmp_path / "b.toml", "qps = [1\n"))
    assert "c.toml: setting 'qsp' is not known: did you mean 'qps'?" in refused(write(tmp_path / "c.toml", "qsp = 1\n"))
    assert "d.toml: qps nan is not possible" in refused(write(tmp_path / "d.toml", "qps = nan\n"))
    assert "e.toml: model {'a': 1} is not usable" in refused(write(tmp_path / "e.toml", "[model]\na = 1\n"))
    (tmp_path / "f.toml").write_bytes(b"\xff\xfe")
    assert "f.toml is not TOML" in refused(str(tmp_path / "f.toml"))


CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 4096,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}


def test_a_model_from_its_config(tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", json.dumps(CONFIG))
    got = catalog.resolve(load(None, {"model": path, "prefill_tp": 4}))
    assert (got.shape.layers, got.shape.kv_heads) == (4, 4)
    assert catalog.resolve(load(None, {"model": str(tmp_path)})).shape.heads == 12


@pytest.mark.parametrize(
    "field", [name for name in CONFIG if name not in ("head_dim", "torch_dtype", "num_key_value_heads")]
)
def test_a_config_without_a_field_is_refused_by_its_name(tmp_path: Path, field: str) -> None:
    path = write(tmp_path / "config.json", json.dumps({k: v for k, v in CONFIG.items() if k != field}))
    assert field in refused(model=path)


def test_config_files_that_are_none(tmp_path: Path) -> None:
    assert "is not JSON" in refused(model=write(tmp_path / "a.json", "{"))
    assert "does not hold a JSON object" in refused(model=write(tmp_path / "b.json", "[1]"))
    assert "cannot be read: No such file" in refused(model=str(tmp_path / "c.json"))
    assert "hidden_size is 'x'" in refused(model=write(tmp_path / "d.json", json.dumps({**CONFIG, "hidden_size": "x"})))


def test_profile_files(tmp_path: Path) -> None:
    assert "is not TOML" in refused(hardware=write(tmp_path / "h.toml", "["))
    assert "[device] is missing" in refused(hardware=write(tmp_path / "i.toml", 'default_calibration = "x"\n'))
    assert "cannot be read" in refused(fabric=str(tmp_path / "f.toml"))


# ---- what goes together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_tp_must_divide_the_heads(side: str) -> None:
    message = refused(**{f"{side}_tp": "3"})
    assert (
        message == f"--{side}-tp 3 does not divide the heads of qwen3-8b (32 attention, 8 KV): use 1, 2, 4, 8, 16, 32"
    )


def test_a_model_must_fit_its_gpus() -> None:
    message = refused(model="llama-3.3-70b", hardware="h100")
    assert "llama-3.3-70b at --prefill-tp 1 has 14" in message
    assert message.endswith("(utilization 0.9): use --prefill-tp 2")
    assert "at --decode-tp 1" in refused(model="llama-3.3-70b", hardware="h100", prefill_tp="4")
    assert "--staging-gib 8 does not fit" in refused(model="llama-3.3-70b", hardware="h100", prefill_tp="2")
    assert "use larger GPUs" in refused(model="llama-3.3-70b", gpu_memory_utilization="0.01")
    load(None, {"model": "llama-3.3-70b", "hardware": "h100", "prefill_tp": 4, "decode_tp": 4})
    load(None, {"model": "llama-3.3-70b", "hardware": "h100", "prefill_tp": 2, "decode_tp": 4, "mode": "pull"})


@pytest.mark.parametrize(("model", "tokens"), [("qwen3-8b", 797_038), ("qwen3-32b", 258_161)])
def test_the_cache_is_as_large_as_measured(model: str, tokens: int) -> None:
    """Cache of one H200 server with vLLM 0.26, as its log says (the project's measurements)."""
    plan = load(None, {"model": model, "mode": "pull"})
    assert catalog.kv_blocks(plan, catalog.resolve(plan), "decode") * plan.block_size == pytest.approx(tokens, rel=0.01)


def test_landing_and_staging_memory_are_taken_from_the_cache() -> None:
    def blocks(side: str, **flags: object) -> int:
        plan = load(None, dict(flags))
        return catalog.kv_blocks(plan, catalog.resolve(plan), side)

    gib = 8 * (1 << 30) // (147_456 * 16)  # blocks of Qwen3-8B in 8 GiB
    assert blocks("decode", mode="pull") - blocks("decode", landing_gib=8) in (gib, gib + 1)
    assert blocks("prefill", mode="pull") - blocks("prefill", staging_gib=8) in (gib, gib + 1)
    assert blocks("decode", path="direct") == blocks("decode", mode="pull")
    assert "--landing-gib 1000 does not fit a decode GPU" in refused(landing_gib="1000")
    assert "--staging-gib 5000 does not fit a prefill GPU" in refused(staging_gib="5000")


def test_a_setting_written_in_two_ways_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="twice"):
        load(write(tmp_path / "s.toml", "prefill-tp = 2\nprefill_tp = 4\n"))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "pushkv"])
@pytest.mark.parametrize(("name", "value"), [("path", "packed"), ("overlap", "chunk")])
def test_what_only_pushkv_has(mode: str, name: str, value: str, tmp_path: Path) -> None:
    assert f"--{name} belongs to --mode pushkv" in refused(mode=mode, **{name: value})
    in_file = write(tmp_path / "s.toml", f'{name} = "{value}"\n')
    assert load(in_file, {"mode": mode}).path == "direct"  # a file may serve several modes
    assert load(None, {"mode": mode, name: value}, lenient=True).overlap == "none"


def test_chunks_need_staging() -> None:
    assert "needs staging" in refused(path="direct", overlap="chunk")
    assert load(None, {"path": "direct"}).overlap == "none"


def test_traces_and_arrivals_go_together(tmp_path: Path) -> None:
    assert "--arrival trace needs --trace FILE" in refused(arrival="trace")
    assert "needs --arrival trace" in refused(trace="t.csv")
    path = write(tmp_path / "t.csv", "arrival_s,input_len,output_len\n0,10,10\n")
    assert load(None, {"arrival": "trace", "trace": path}).requests is None


# ---- faults --------------------------------------------------------------------------------------------------------


def test_faults_in_order_of_time(tmp_path: Path) -> None:
    path = write(
        tmp_path / "f.toml",
        '[[fault]]\nkind = "partition"\ntarget = "P0-D1"\nat_s = 9\nduration_s = 2\n'
        '[[fault]]\nkind = "decode-kill"\ntarget = "D1"\nat_s = 1.5\n',
    )
    got = load(None, {"faults": path, "decode": 2})
    assert got.fault_list == (Fault("decode-kill", "D1", 1.5), Fault("partition", "P0-D1", 9.0, 2.0))
    assert got.as_json()["fault_list"][0] == {"kind": "decode-kill", "target": "D1", "at_s": 1.5, "duration_s": None}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "has no [[fault]] table"),
        ("faults = 1", "key 'faults' is not known: did you mean 'fault'?"),
        ("[fault]\nat_s = 1", "has no [[fault]] table"),
        ('[[fault]]\nkind = "decode-kil"', "kind 'decode-kil' is not known: did you mean 'decode-kill'?"),
        ('[[fault]]\nkind = "pause"\ntarget = "X0"', "target 'X0' does not fit pause; expected P0 or D0"),
        ('[[fault]]\nkind = "partition"\ntarget = "P0"', "does not fit partition; expected P0-D0"),
        ('[[fault]]\nkind = "pause"\ntarget = "D7"\nat_s = 1', "target D7 does not exist; the last one is D0"),
        ('[[fault]]\nkind = "pause"\ntarget = "D0"\nat_s = -1', "at_s -1 is not possible"),
        ('[[fault]]\nkind = "pause"\ntarget = "D0"\nat_s = nan', "at_s nan is not possible"),
        ('[[fault]]\nkind = "pause"\ntarget = "D0"', "at_s None is not possible"),
        ('[[fault]]\nkind = "pause"\ntarget = "D0"\nat_s = 1', "duration_s is missing"),
        ('[[fault]]\nkind = "pause"\ntarget = "D0"\nat = 1', "key 'at' is not known"),
    ],
)
def test_a_bad_fault_is_refused(tmp_path: Path, text: str, names: str) -> None:
    message = refused(faults=write(tmp_path / "f.toml", text))
    assert "f.toml" in message
    assert names in message
