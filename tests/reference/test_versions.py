"""The hooks of the vLLM that is installed, and the connector on it. Skipped where vLLM is missing."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pushkv.reference import versions
from pushkv.reference.cpu_formats import TRANSPOSED_K

RECORDED = Path(__file__).parent / "hooks"


class Base:
    """As old as it gets."""

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return False

    def get_finished(self, finished_req_ids: set[str]) -> None:
        return None

    def on_new_request(self, request: Any, more: int) -> None:
        return None

    def something_else(self, x: int) -> None:
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> None:
        return None


def test_check_tells_known_absent_changed_and_new() -> None:
    found = {finding.hook: finding for finding in versions.check(Base)}
    assert found["get_finished"].state == "known" and not found["get_finished"].trouble
    assert found["prefer_cross_layer_blocks"].state == "known"
    assert found["build_kv_connector_stats"].state == "known"
    assert found["on_new_request"].state == "changed" and found["on_new_request"].trouble
    assert found["something_else"].state == "new" and not found["something_else"].trouble
    assert found["start_load_kv"].state == "absent" and found["start_load_kv"].trouble
    assert found["get_transfer_results"].state == "absent" and not found["get_transfer_results"].trouble


@pytest.mark.parametrize(
    ("version", "says"), [("0.26.0", ""), ("0.32.1+cpu", ""), ("0.30.0", "0.30.0"), ("dev", "dev")]
)
def test_a_version_on_which_it_has_not_run_is_doubted(version: str, says: str) -> None:
    found = [doubt for doubt in versions.doubts(version, Base) if "has not run" in doubt]
    assert len(found) == bool(says)
    assert all(f"has not run on vLLM {says}, but on 0.26 and 0.32" in doubt for doubt in found)


def test_hooks_that_are_not_as_known_are_named() -> None:
    found = versions.doubts("0.32.0", Base)
    assert any("on_new_request is changed" in doubt for doubt in found)
    assert any("start_load_kv is absent" in doubt for doubt in found)
    assert not any("get_transfer_results" in doubt or "something_else" in doubt for doubt in found)


def test_this_vllm_is_not_doubted() -> None:
    base = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
    if versions.minor(versions.installed()) not in versions.RUN:
        pytest.skip("another version")
    assert versions.doubts(versions.installed(), base.KVConnectorBase_V1, base.SupportsHMA) == []


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_nothing_else_imports_vllm() -> None:
    """Beside this module only what vLLM loads: the connector and its metrics."""
    folder = Path(versions.__file__).parent
    assert {path.stem for path in folder.glob("*.py") if "vllm" in imports_of(path)} == {
        "connector",
        "metrics",
        "versions",
    }


def test_abilities() -> None:
    old = versions.abilities(Base)
    assert not old.failed_requests and old.may_fail(1) and not old.may_fail(2)
    assert not old.loads_apart(1) and not old.loads_apart(2)
    new = versions.Abilities(failed_requests=True)
    assert new.may_fail(2) and new.loads_apart(2) and not new.loads_apart(1)


def test_groups_that_move() -> None:
    group = SimpleNamespace
    assert versions.transferred_groups(SimpleNamespace(kv_cache_groups=[group(), group()])) is None
    some = SimpleNamespace(kv_cache_groups=[group(enable_kv_transfer=False), group(enable_kv_transfer=True)])
    assert versions.transferred_groups(some) == (1,)


def test_every_hook_of_this_vllm_is_known() -> None:
    base = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
    findings = versions.check(base.KVConnectorBase_V1, base.SupportsHMA)
    assert [finding for finding in findings if finding.trouble] == []
    assert [finding.hook for finding in findings if finding.state == "new"] == []


@pytest.mark.parametrize("recorded", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_the_hooks_of_versions_that_are_not_installed(recorded: Path) -> None:
    """Recorded from the wheel of that version: `json.dump(hooks_of(KVConnectorBase_V1, SupportsHMA), ...)`."""
    findings = versions.compare(json.loads(recorded.read_text(encoding="utf-8")))
    assert [finding for finding in findings if finding.trouble or finding.state == "new"] == []


def test_what_is_asked_of_the_class_can_be() -> None:
    """0.33 asks the class about sleep mode; a property would be no answer."""
    pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
    from pushkv.reference.connector import PushConnector

    assert PushConnector.supports_sleep_mode(None) is False
    for name, hook in versions.HOOKS.items():
        mine = vars(PushConnector).get(name)
        assert mine is None or isinstance(mine, property) == (hook.parameters is None), name


def test_the_connector_overrides_with_the_same_parameters() -> None:
    base = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
    from pushkv.reference.connector import PushConnector

    assert not inspect.isabstract(PushConnector)
    for name, member in vars(PushConnector).items():
        original = getattr(base.KVConnectorBase_V1, name, None) or getattr(base.SupportsHMA, name, None)
        if original is None or name.startswith("_") or isinstance(member, property):
            continue
        assert list(inspect.signature(getattr(PushConnector, name)).parameters) == list(
            inspect.signature(original).parameters
        ), name


def test_importing_makes_it_known_by_its_name_and_registering_again_is_harmless() -> None:
    factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    from pushkv.reference.connector import PushConnector, register

    assert factory.get_connector_class_by_name("PushConnector") is PushConnector
    register()
    assert factory.get_connector_class_by_name("PushConnector") is PushConnector


@pytest.mark.parametrize("isa", TRANSPOSED_K)
@pytest.mark.parametrize("block", [32, 64])
def test_the_cpu_kernel_stores_k_and_v_as_we_say(isa: str, block: int) -> None:
    """Marked keys and values through the kernel that vLLM writes its cache with."""
    ops = pytest.importorskip("vllm._custom_ops")
    torch = pytest.importorskip("torch")
    if not hasattr(ops, "cpu_attn_reshape_and_cache"):
        pytest.skip("not a CPU build")
    heads, size, blocks = 2, 32, 3
    cache = torch.zeros(blocks, heads, block, 2 * size, dtype=torch.bfloat16)
    k_cache, v_cache = cache.view(blocks, heads, 2 * block, size).chunk(2, dim=2)
    for mark in ("token", "element"):
        values = torch.arange(block).view(-1, 1, 1) if mark == "token" else torch.arange(size).view(1, 1, -1)
        marked = values.expand(block, heads, size).to(torch.bfloat16).contiguous()
        ops.cpu_attn_reshape_and_cache(marked, marked, k_cache, v_cache, torch.arange(block) + block, isa)
        for head in range(heads):
            slab = cache[1, head].reshape(-1)
            assert torch.equal(slab[: block * size].view(size, block).T, marked[:, head])
            assert torch.equal(slab[block * size :].view(block, size), marked[:, head])


@pytest.mark.parametrize(
    ("output", "writes"),
    [
        ({"new_block_ids_to_zero": None, "kv_cache_block_copies": None}, False),
        ({"new_block_ids_to_zero": [], "kv_cache_block_copies": []}, False),
        ({"new_block_ids_to_zero": [3], "kv_cache_block_copies": None}, True),
        ({"new_block_ids_to_zero": None, "kv_cache_block_copies": [(1, 2)]}, True),
        ({"new_block_ids_to_zero": None}, True),  # it cannot be told
    ],
)
def test_whether_a_step_writes_blocks_before_its_forward(output: dict[str, Any], writes: bool) -> None:
    assert versions.writes_blocks(SimpleNamespace(**output)) is writes
