"""The bundled checkpoint, as GGUF and as a Hugging Face folder of the same weights, against transformers in float32."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from configs.sampling import SamplingParams
from engine.llm import LLM

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 5, 8, 13,",
    "Photosynthesis is the process by which",
    "Q: Who wrote Hamlet?\nA:",
    "To make a good cup of tea, first",
    "The three laws of motion are",
    "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox",
    "Il était une fois",
    "SELECT name FROM",
    "In 1969, astronauts",
    "A haiku about rain:\n",
    "Die Hauptstadt von Deutschland ist",
    "The difference between a list and a tuple in Python is",
    "My favourite animal is the",
    "Newton, Einstein and",
]


@pytest.fixture(scope="module")
def transformers_model(smollm2_path: Path):
    return AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent,
        gguf_file=smollm2_path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()


def greedy(model: Path) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """Prompt ids, output ids and texts."""
    llm = LLM(str(model), dtype="float32", kv_cache_tokens=4096, max_num_seqs=20)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, skip_special_tokens=False)
    requests = llm.generate(PROMPTS, params)
    outputs = [request.outputs[0] for request in requests]
    return [r.prompt_token_ids for r in requests], [o.token_ids for o in outputs], [o.text for o in outputs]


@pytest.mark.timeout(300)
def test_greedy_text_equals_transformers_from_both_formats(smollm2_path, transformers_model, tmp_path):
    transformers_model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name).save_pretrained(tmp_path)
    prompts, outputs, texts = greedy(smollm2_path)
    assert greedy(tmp_path) == (prompts, outputs, texts)
    near_ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_TOKENS
        with torch.inference_mode():
            logits = transformers_model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        behind = logits.max(dim=1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        near_ties += int((behind > 0).sum())
        assert behind.max() < 1e-3  # float32 sums in another order may swap two equals
    assert near_ties <= len(PROMPTS) * NUM_TOKENS // 100
