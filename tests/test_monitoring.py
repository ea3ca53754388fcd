"""Prometheus, Grafana and docker compose are configured for metrics, files and ports that exist."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.test_metrics import rows

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/octavo.json").read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
METRICS = {name: (kind, labels) for name, kind, labels, _ in rows((ROOT / "docs/operations.md").read_text())}
WITHOUT_MODEL = {"octavo:requests_refused_total", "octavo:http_requests_total", "octavo:http_requests_running"}
PROCESS = [
    f"{prefix}process_{name}"
    for prefix in ("", "octavo_engine_")
    for name in ("cpu_seconds_total", "resident_memory_bytes")
]


def series() -> set[str]:
    """Names of all series, as one asks for them."""
    names = {"up", *PROCESS}
    for name, (kind, _) in METRICS.items():
        names |= {name + part for part in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))}
    return names


def labels_of(name: str) -> set[str]:
    for metric, (_, labels) in METRICS.items():
        if re.fullmatch(f"{metric}(_bucket|_sum|_count)?", name):
            return {*labels, *(() if metric in WITHOUT_MODEL else ("model_name", "engine")), "le"}
    return {"job", "instance"}


def queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for rule in ALERTS["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(
    ("title", "query"), [pytest.param(*pair, id=f"{index} {pair[0]}") for index, pair in enumerate(queries())]
)
def test_every_query_asks_for_what_is_there(title: str, query: str) -> None:
    asked = re.findall(r"\b((?:vllm|octavo):\w+|(?:octavo_engine_)?process_\w+|up)\b", query)
    assert asked
    assert set(asked) <= series()
    for name, selector in re.findall(r"((?:vllm|octavo):\w+|up)\{(.*?)\}", query):
        assert set(re.findall(r"(\w+)=~?\"", selector)) <= labels_of(name)
    for grouping in re.findall(r"by \((.*?)\)", query):
        assert {label.strip() for label in grouping.split(",")} <= set().union(*map(labels_of, asked))
    if "_bucket" in query:
        assert "by (le" in query
    for counted in asked:
        is_counter = counted.endswith(("_total", "_bucket", "_sum", "_count"))
        assert not is_counter or re.search(rf"(rate|increase)\({re.escape(counted)}", query), (
            "a counter only ever rises"
        )


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    panels = DASHBOARD["panels"]
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)


def test_the_dashboard_takes_any_data_source() -> None:
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([DASHBOARD["panels"], DASHBOARD["templating"]])))
    assert used - {"__rate_interval", "__all"} == variables
    sources = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "datasource" in panel}
    assert sources == {"${datasource}"}


def test_compose_starts_what_finds_each_other() -> None:
    services = COMPOSE["services"]
    [target] = PROMETHEUS["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    for kind in ("octavo-cpu", "octavo-gpu"):
        assert host in services[kind]["networks"]["default"]["aliases"]
        assert port in services[kind]["command"]
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert [source["url"] for source in sources] == ["http://prometheus:9090"]
    for name, port in (("prometheus", 9090), ("grafana", 3000)):
        assert services[name]["profiles"] == ["monitoring"]
        assert services[name]["ports"] == [f"127.0.0.1:{port}:{port}"]
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", services[name]["image"]), "a version, not the latest"


def test_what_compose_mounts_exists() -> None:
    mounts = [volume for name in ("prometheus", "grafana") for volume in COMPOSE["services"][name]["volumes"]]
    here = dict(mount.split(":")[:2] for mount in mounts if mount.startswith("./"))
    assert all((ROOT / folder).is_dir() for folder in here)
    assert all(mount.endswith(":ro") for mount in mounts if mount.startswith("./"))
    assert {mount.split(":")[0] for mount in mounts if not mount.startswith("./")} == set(COMPOSE["volumes"])
    [provider] = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/octavo.yml").read_text())["providers"]
    assert here["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana/dashboards" / Path(home).name).is_file()
    assert [
        str(path.name) for path in (DEPLOY / "prometheus").glob("*.yml") if path.name in PROMETHEUS["rule_files"]
    ] == ["alerts.yml"]


def test_containers_get_the_time_that_a_drain_takes() -> None:
    from configs.settings import ServerConfig

    for kind in ("octavo-cpu", "octavo-gpu"):
        seconds = int(COMPOSE["services"][kind]["stop_grace_period"].removesuffix("s"))
        assert seconds > ServerConfig().shutdown_timeout


def promtool() -> str | None:
    return shutil.which("promtool") or shutil.which("promtool", path=ROOT / "build/prometheus/usr/bin")


@pytest.mark.skipif(promtool() is None, reason="promtool is not installed; `make test-monitoring` fetches it")
def test_prometheus_own_tool_reads_configuration_and_queries(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "1m").replace("$model", ".*")}
        for number, (_, query) in enumerate(queries())
    ]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for command in (["config", str(DEPLOY / "prometheus/prometheus.yml")], ["rules", str(tmp_path / "queries.yml")]):
        checked = subprocess.run([str(promtool()), "check", *command], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert "SUCCESS" in checked.stdout
