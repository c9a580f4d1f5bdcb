"""The operator's files name metrics that exist, speak PromQL, and are what Kubernetes expects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pushkv.reference.metric_names import COUNTERS, FROM_THE_START, GAUGES, PARTS, REASONS, TIMES
from pushkv.reference.settings import ConnectorSettings, SettingsError

yaml = pytest.importorskip("yaml")
promql_parser = pytest.importorskip("promql_parser")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
pytest.importorskip("prometheus_client")

from pushkv.router import metrics  # noqa: E402
from pushkv.router.settings import read  # noqa: E402

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RECORDED = ROOT / "tests" / "router" / "recordings" / "metrics_types.txt"
KUBERNETES = "1.31"
FROM_PROMETHEUS = {"instance", "job", "le"}


def connector_series() -> dict[str, set[str]]:
    """Series of the connector and their own labels, from the names that it counts by."""
    own = {"what", "model_name", "engine"}
    found = {f"pushkv:{name}_total": own for name in COUNTERS}
    found |= {f"pushkv:{name}": own - {"what"} for name in GAUGES}
    for name in TIMES:
        for part in ("bucket", "count", "sum"):
            found[f"pushkv:{name.removesuffix('_s')}_seconds_{part}"] = own - {"what"}
    return found


def router_series() -> dict[str, set[str]]:
    """From the registry of a router: what its `/metrics` shows."""
    found = {f"{metrics.PREFIX}{name}_total": set(labels) for name, (_, labels) in metrics.COUNTERS.items()}
    found |= {metrics.PREFIX + name: set(labels) for name, (_, labels) in metrics.GAUGES.items()}
    for name in metrics.HISTOGRAMS:
        found |= {f"{metrics.PREFIX}{name}_{part}": set() for part in ("bucket", "count", "sum")}
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL expression, and where it stands."""
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in json.loads((DEPLOY / "grafana" / "pushkv.json").read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def wrong(expression: str, series: dict[str, set[str]]) -> list[str]:
    """What ``expression`` names that does not exist."""
    expression = expression.replace("$__rate_interval", "5m")
    promql_parser.parse(expression)
    names = set(re.findall(r"\bpushkv[_:][a-zA-Z_:]+", expression))
    found = [name for name in sorted(names) if name not in series]
    allowed = set().union(FROM_PROMETHEUS, *(series.get(name, set()) for name in names))
    used = {label.strip() for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in group.split(",")}
    used |= set(re.findall(r'(\w+)=~?"', expression))
    found += sorted(used - allowed)
    found += [reason for reason in re.findall(r'what="([^"]*)"', expression) if reason not in REASONS]
    return found or ([] if names else ["no metric of ours"])


def test_the_names_are_those_that_a_real_server_showed() -> None:
    """The recording is the type lines of a real vLLM server that had loaded the connector."""
    shown = dict(re.findall(r"# TYPE (\S+) (\w+)", RECORDED.read_text(encoding="utf-8")))
    ours = set(connector_series())
    assert {n for n, kind in shown.items() if kind != "histogram"} <= ours
    assert {f"{name}_bucket" for name, kind in shown.items() if kind == "histogram"} <= ours


def test_the_router_shows_the_names() -> None:
    text = metrics.RouterMetrics().text().decode()
    shown = set(re.findall(r"# TYPE (\S+) counter", text)) | set(re.findall(r"# TYPE (\S+) gauge", text))
    assert {name for name in router_series() if not re.search("_(bucket|count|sum)$", name)} <= shown


def test_every_expression_can_be_parsed_and_names_what_exists() -> None:
    series = connector_series() | router_series()
    found = {where: bad for where, expression in expressions() if (bad := wrong(expression, series))}
    assert not found


def test_the_check_can_fail() -> None:
    series = connector_series() | router_series()
    for bad in (
        "rate(pushkv:transfers_lost_total[5m])",
        "sum by (colour) (pushkv:leases)",
        "up",
        'pushkv:path_total{what="x"}',
    ):
        assert wrong(bad, series), bad
    with pytest.raises(ValueError):  # noqa: PT011 - of promql_parser
        wrong("sum by (", series)


def test_what_alerts_at_its_first_event_is_there_before() -> None:
    """Prometheus sees no increase in a counter that appears with its first event."""
    shown = metrics.RouterMetrics().text().decode()
    labels = [found.partition(":")[::2] for names in PARTS.values() for found in names.values()]
    for name, what in FROM_THE_START:
        shown += f'pushkv:{name}_total{{what="{what}"}} 0.0\n' if what else f"pushkv:{name}_total 0.0\n"
        if what and {(n, w) for n, w in labels if n == name} <= set(FROM_THE_START):  # all of them: a sum is there too
            shown += f"pushkv:{name}_total 0.0\n" if any(n == name for n, _ in labels) else ""
    checked = 0
    for where, expression in expressions():
        for series in re.findall(r"increase\(([^\[]*)\[[^)]*\)\) > 0$", expression):
            checked += where.startswith("Pushkv")
            assert f"\n{series} 0.0\n" in shown, where
    assert checked >= 4


def test_quarantine_failures_and_leases_have_alerts_and_panels() -> None:
    said = " ".join(expression for _, expression in expressions())
    everything = set(connector_series()) | set(router_series())
    unseen = {n for n in everything if not re.search(r"_(count|sum)$", n) and n not in said}
    assert unseen <= {
        "pushkv:descriptors_total",
        "pushkv:peers",
        "pushkv:records_dropped_total",
        "pushkv:blocks_kept_total",
    }
    alerts = " ".join(e for where, e in expressions() if where.startswith("Pushkv"))
    for name in ("pushkv:quarantined", "pushkv:transfers_failed_total", 'what="lease"', "pushkv:leases"):
        assert name in alerts


def manifests() -> list[dict[str, Any]]:
    found = []
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        found += list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("manifest", manifests(), ids=lambda m: f"{m['kind']} {m['metadata']['name']}")
def test_a_manifest_is_valid(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_validation_can_fail() -> None:
    bad = next(one for one in manifests() if one["kind"] == "StatefulSet")
    bad["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(bad, KUBERNETES, strict=True)


def test_the_manifests_fit_each_other() -> None:
    """Selectors, the secret, EFA, the connector's configuration, and the router's settings."""
    found = manifests()
    (secret,) = yaml.safe_load_all((DEPLOY / "secret.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(secret, KUBERNETES, strict=True)
    assert secret["metadata"]["name"] == "pushkv"
    with pytest.raises(SettingsError, match="at least 16 characters"):  # nobody runs with a secret that all can read
        ConnectorSettings.read({}, {"PUSHKV_SECRET": secret["stringData"]["secret"]})
    services = {one["metadata"]["name"] for one in found if one["kind"] == "Service"}
    hosts = set()
    for one in found:
        if one["kind"] != "StatefulSet":
            continue
        name = one["metadata"]["name"]
        assert one["spec"]["serviceName"] in services
        hosts |= {f"{name}-{n}.{one['spec']['serviceName']}" for n in range(one["spec"]["replicas"])}
        container = one["spec"]["template"]["spec"]["containers"][0]
        assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] >= 1
        environment = {entry["name"]: entry for entry in container["env"]}
        assert environment["PUSHKV_SECRET"]["valueFrom"]["secretKeyRef"] == {"name": "pushkv", "key": "secret"}
        argument = next(a for a in container["args"] if a.startswith("--kv-transfer-config="))
        config = json.loads(argument.partition("=")[2])
        assert config["kv_role"] == ("kv_producer" if "prefill" in name else "kv_consumer")
        assert config["kv_connector_module_path"] == "pushkv.reference.connector"
    text = next(one for one in found if one["kind"] == "ConfigMap")["data"]["router.toml"]
    settings = read_text(text)
    assert {server.url for server in (*settings.prefill, *settings.decode)} == {f"http://{host}:8000" for host in hosts}


def read_text(text: str) -> Any:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return read(file.name, {})


def test_the_dashboard_is_whole() -> None:
    board = json.loads((DEPLOY / "grafana" / "pushkv.json").read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) > 20
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["type"] == "row" or (panel["description"] and panel["targets"]) for panel in board["panels"])
