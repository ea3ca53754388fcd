"""Load testers as their users run them: every request succeeds, and the tokens are those that were asked for.

The testers count with transformers' tokenizer of the checkpoint, the server with its own.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import run

VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")
BIN = Path(sys.executable).parent
REQUESTS, CONCURRENCY, INPUT, OUTPUT = 20, 4, 64, 16
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def guidellm(url: str, hf_folder: Path, report: Path, path: str, profile: str, requests: int = REQUESTS) -> list[dict]:
    """Metrics of each benchmark of the profile."""
    run(
        [
            *[BIN / "guidellm", "run", "--disable-progress"],
            *["--backend", f"kind=openai_http,target={url},request_format={path}"],
            *["--profile", profile],
            *["--constraint", f"kind=max_requests,count={requests}"],
            *["--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"],
            *["--tokenizer", f"kind=huggingface_auto,model={hf_folder}"],
            *["--output", f"kind=json,path={report}"],
        ]
    )
    return [benchmark["metrics"] for benchmark in json.loads(report.read_text())["benchmarks"]]


def extremes(distribution: dict) -> tuple[float, float]:
    return distribution["min"], distribution["max"]


def test_guidellm_with_a_constant_number_of_streams(url: str, hf_folder: Path, tmp_path: Path) -> None:
    profile = f"kind=concurrent,streams={CONCURRENCY}"
    [metrics] = guidellm(url, hf_folder, tmp_path / "report.json", COMPLETIONS, profile)
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert extremes(metrics["prompt_token_count"]["successful"]) == (INPUT, INPUT)
    assert extremes(metrics["output_token_count"]["successful"]) == (OUTPUT, OUTPUT)
    assert extremes(metrics["time_to_first_token_ms"]["successful"])[0] > 0


def test_guidellm_sweeps_from_one_stream_to_all_at_once(url: str, hf_folder: Path, tmp_path: Path) -> None:
    benchmarks = guidellm(url, hf_folder, tmp_path / "report.json", CHAT, "kind=sweep,sweep_size=3", 8)
    assert len(benchmarks) == 3
    for metrics in benchmarks:
        assert metrics["request_totals"]["errored"] == 0
        assert metrics["request_totals"]["successful"] == 8
        assert extremes(metrics["output_token_count"]["successful"]) == (OUTPUT, OUTPUT)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_aiperf(url: str, hf_folder: Path, tmp_path: Path, kind: str) -> None:
    run(
        [
            *[BIN / "aiperf", "profile", "--ui", "none", "--model", "smollm2", "--url", url, "--tokenizer", hf_folder],
            *["--endpoint-type", kind, "--streaming", "--extra-inputs", "ignore_eos:true", "--random-seed", "1"],
            *["--concurrency", str(CONCURRENCY), "--request-count", str(REQUESTS)],
            *["--isl", str(INPUT), "--osl", str(OUTPUT), "--artifact-dir", tmp_path],
        ],
        HF_HUB_OFFLINE=None,  # with it, aiperf looks for a local folder in the hub's cache
    )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (report["request_count"]["avg"], report["error_summary"]) == (REQUESTS, [])
    assert extremes(report["usage_completion_tokens"]) == (OUTPUT, OUTPUT)
    fewest, most = extremes(report["usage_prompt_tokens"])
    assert fewest == most
    assert fewest == INPUT if kind == "completions" else fewest > INPUT  # the chat template adds its own


@pytest.mark.skipif(not VLLM_PYTHON, reason="VLLM_PYTHON is not set: the Python of an environment that has vLLM")
@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("openai", COMPLETIONS),
        ("openai-chat", CHAT),
        ("openai-responses", "/v1/responses"),
        ("openai-embeddings", "/v1/embeddings"),
    ],
)
def test_vllm_bench_serve(url: str, hf_folder: Path, tmp_path: Path, backend: str, path: str) -> None:
    run(
        [
            *[VLLM_PYTHON, Path(__file__).with_name("vllm_bench_serve.py")],
            *["--backend", backend, "--base-url", url, "--endpoint", path],
            *["--model", "smollm2", "--tokenizer", hf_folder, "--seed", "1", "--ignore-eos"],
            *["--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)],
            *["--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENCY)],
            *["--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"],
        ],
        VLLM_TARGET_DEVICE="cpu",
        VLLM_NO_USAGE_STATS="1",
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == REQUESTS
    assert result.get("total_output_tokens", 0) == (0 if backend == "openai-embeddings" else REQUESTS * OUTPUT)
    assert result["total_input_tokens"] >= REQUESTS * INPUT
