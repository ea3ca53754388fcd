"""lm-evaluation-harness over HTTP tells what its own `hf` back end tells of the same weights in float32.

Its kinds of requests are all here: choices by log-likelihood, continuations until a stop string, perplexity of texts.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import run, serving

TASKS = ["octavo_facts", "octavo_continuations", "octavo_texts"]
TOLERANCE = 1e-3
"""Of one log-likelihood, in nats."""

Samples = dict[tuple[str, int], Any]


def lm_eval(output: Path, model: str, model_args: dict[str, Any], *options: str, tasks: list[str] = TASKS) -> Samples:
    """Responses by task and item; those with log-likelihoods as pairs of a number and whether it is greedy."""
    command = [Path(sys.executable).with_name("lm_eval"), "run", "--model", model, "--model_args"]
    command += [",".join(f"{name}={value}" for name, value in model_args.items()), *options]
    folder = Path(__file__).with_name("tasks")
    run([*command, "--tasks", *tasks, "--include_path", folder, "--log_samples", "--output_path", output], cwd=folder)
    samples = {}
    for task in tasks:
        [file] = output.glob(f"*/samples_{task}_*.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            samples[task, sample["doc_id"]] = sample
    return samples


def same(ours: Any, theirs: Any, task: str) -> bool:
    """Scores and texts are equal, log-likelihoods close."""
    if task == "octavo_continuations":
        return ours["resps"] == theirs["resps"] and ours["exact_match"] == theirs["exact_match"]
    if task == "octavo_texts":
        return float(ours["resps"][0][0]) == pytest.approx(float(theirs["resps"][0][0]), abs=TOLERANCE)
    pairs = zip(ours["filtered_resps"], theirs["filtered_resps"], strict=True)
    close = all(float(a[0]) == pytest.approx(float(b[0]), abs=TOLERANCE) and a[1] == b[1] for a, b in pairs)
    return close and ours["acc"] == theirs["acc"] and ours["acc_norm"] == theirs["acc_norm"]


@pytest.fixture(scope="module")
def float32_url(hf_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("float32") / "log"
    exact = ["--dtype", "float32", "--quantization", "none"]
    with serving(log, str(hf_folder), "--served-model-name", "smollm2", *exact) as address:
        yield address


def api(url: str, path: str, hf_folder: Path, **others: Any) -> dict[str, Any]:
    return {"model": "smollm2", "base_url": url + path, "tokenizer": hf_folder, **others}


@pytest.fixture(scope="module")
def expected(hf_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """What the harness computes itself."""
    model_args = {"pretrained": hf_folder, "dtype": "float32"}
    return lm_eval(tmp_path_factory.mktemp("hf"), "hf", model_args, "--device", "cpu", "--batch_size", "8")


@pytest.mark.parametrize(
    ("tokenized", "batch_size", "num_concurrent"), [(True, 1, 1), (True, 4, 1), (False, 4, 1), (False, 1, 4)]
)
def test_completions_score_as_hf(
    float32_url: str, hf_folder: Path, expected: Samples, tmp_path: Path,
    tokenized: bool, batch_size: int, num_concurrent: int,
) -> None:  # fmt: skip
    how = {"tokenizer_backend": "huggingface", "tokenized_requests": tokenized, "num_concurrent": num_concurrent}
    model_args = api(float32_url, "/v1/completions", hf_folder, **how)
    found = lm_eval(tmp_path, "local-completions", model_args, "--batch_size", str(batch_size))
    assert found.keys() == expected.keys()
    different = {key: (found[key]["resps"], expected[key]["resps"]) for key in found
                 if not same(found[key], expected[key], key[0])}  # fmt: skip
    assert not different
    right = [sample["acc"] for (task, _), sample in found.items() if task == "octavo_facts"]
    assert sum(right) > len(right) / 2


def test_chats_answer_as_hf(float32_url: str, hf_folder: Path, tmp_path: Path) -> None:
    templated = {"tasks": ["octavo_continuations"]}
    theirs = {"pretrained": hf_folder, "dtype": "float32"}
    options = ["--apply_chat_template", "--batch_size", "1"]
    expected = lm_eval(tmp_path / "hf", "hf", theirs, "--device", "cpu", *options, **templated)
    model_args = api(float32_url, "/v1/chat/completions", hf_folder, num_concurrent=4)
    found = lm_eval(tmp_path / "octavo", "local-chat-completions", model_args, *options, **templated)
    texts = {key: sample["resps"] for key, sample in expected.items()}
    assert {key: sample["resps"] for key, sample in found.items()} == texts
    assert len(str(texts)) > 100
