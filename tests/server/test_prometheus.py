"""A real Prometheus, of Debian's packages, scrapes a real server and answers what the dashboard asks: minutes."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.server.test_live_metrics import settled
from tests.server.test_live_server import LiveServer, live_server
from tests.test_monitoring import DASHBOARD, PROMETHEUS, queries

ROOT = Path(__file__).parents[2]


def prometheus() -> str | None:
    return shutil.which("prometheus") or shutil.which("prometheus", path=ROOT / "build/prometheus/usr/bin")


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(prometheus() is None, reason="Prometheus is not there; `make test-monitoring` fetches it"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--kv-cache-tokens", "208", "--memory-bandwidth", "50", "--api-key", "secret")
    with live_server(tmp_path_factory.mktemp("scraped") / "log", *flags, "--metrics-without-key") as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def url(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a Prometheus with the shipped configuration, but for the target and the interval."""
    folder = tmp_path_factory.mktemp("prometheus")
    job = {**PROMETHEUS["scrape_configs"][0], "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}
    config = {**PROMETHEUS, "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(ROOT / "deploy/prometheus/alerts.yml", folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [str(prometheus()), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        wait(lambda: ask(f"http://{address}", "up") == [1.0], folder / "log")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def wait(condition: Any, log: Path | None = None) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, log and log.read_text()
        time.sleep(0.2)


def ask(url: str, query: str) -> list[float]:
    """Values of the series that the query gives now."""
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=10)
    except httpx.ConnectError:
        return []
    if answer.status_code == 503:  # it starts
        return []
    assert answer.json()["status"] == "success", answer.text
    return [float(series["value"][1]) for series in answer.json()["data"]["result"]]


def test_what_is_scraped_is_what_the_server_says(server: LiveServer, url: str) -> None:
    headers = {"authorization": "Bearer secret"}
    body = {"prompt": "One day, a fox", "max_tokens": 48, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        work = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
            for _ in range(16)
        ]
        assert {one.result().status_code for one in work} == {200}
    values = settled(server)
    wait(lambda: ask(url, "vllm:generation_tokens_total") == [values["vllm:generation_tokens_total"]])
    assert values["vllm:generation_tokens_total"] == 16 * 48
    for name in ("vllm:iteration_tokens_total_count", "octavo:recomputed_tokens_total", "octavo:engine_up"):
        assert ask(url, name) == [values[name]], name
    [target] = httpx.get(f"{url}/api/v1/targets").json()["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert target["lastScrapeDuration"] < 1
    assert httpx.get(f"{server.url}/v1/models").status_code == 401


def test_every_panel_has_something_to_show(server: LiveServer, url: str) -> None:
    wait(lambda: ask(url, "count_over_time(up[1m])")[0] >= 3)
    titles = {panel["title"] for panel in DASHBOARD["panels"]}
    for title, query in queries():
        answered = ask(url, query.replace("$__rate_interval", "1m").replace("$model", ".*"))
        assert answered or title not in titles, query


def test_alerts_are_loaded_and_quiet(url: str) -> None:
    [group] = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]
    assert [rule["health"] for rule in group["rules"]] == ["ok"] * 5
    assert {rule["name"] for rule in group["rules"] if rule["state"] == "firing"} == set()


def test_a_server_that_has_gone_is_seen_to_be(server: LiveServer, url: str) -> None:
    server.stop()
    wait(lambda: ask(url, "up") == [0.0])
