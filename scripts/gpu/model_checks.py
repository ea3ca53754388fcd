"""Small random models of each family: logits on this device against transformers in float32.

How far they may be off, transformers says: its own network in bfloat16 on this device has some error; the engine's may
be twice that.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.utils.logging import disable_progress_bar

from configs.settings import EngineConfig
from engine.bench.steps import Steps
from engine.checkpoints import StoredTensor, open_checkpoint
from engine.kernels.quantised import Float8Weight
from engine.loading import load_model
from engine.weights.dequantise import read_into
from engine.weights.mapping import modules
from engine.weights.precision import ROUNDED_FLOAT8, Precision
from engine.weights.quantise import read_quantised

from . import dry
from .attention_cases import relative_error
from .bench import Bench

FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama with llama3 rope": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
        },
    ),
    "mistral with a window": (MistralConfig, {"sliding_window": 2}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
}
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "pad_token_id": None,
}
DRY = SMALL | {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
BLOCK_SIZE = 64
LEAST_LIMIT = 1e-3
SMALLEST_VOCABULARY = 96


QUANTISED_LIMIT = {"int8": 0.04, "int4": 0.04, "fp8": 0.15}
"""fp8 rounds what is multiplied as well, to three bits behind the first."""
COMPILE_SECONDS = 20.0


@torch.inference_mode()
def run(bench: Bench) -> None:
    disable_progress_bar()
    for family in FAMILIES:
        _run(bench, family, family, {}, seconds=2)
    for setting in ("int8", "int4") if bench.plan.is_dry else QUANTISED_LIMIT:
        _run(bench, f"llama, {setting}", "llama", {"quantization": setting}, seconds=3)
    if not bench.plan.is_dry:
        _run(bench, "llama, torch_compile", "llama", {"torch_compile": True}, seconds=COMPILE_SECONDS)


def _run(bench: Bench, what: str, family: str, settings: dict[str, Any], seconds: float) -> None:
    if not bench.has(seconds, what):
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            _check(bench, what, family, Path(folder), settings)
        except Exception as error:
            bench.fail(what, error)


def _check(bench: Bench, what: str, family: str, folder: Path, settings: dict[str, Any]) -> None:
    """All prompts at once, then one token of each as a decode step."""
    device, is_dry = bench.plan.device, bench.plan.is_dry
    num_seqs, length = (1, 4) if is_dry else (4, 150)
    _write_random_model(folder, family, is_dry)
    token_ids = torch.randint(0, SMALLEST_VOCABULARY, (num_seqs, length + 1))
    config = EngineConfig(
        model=str(folder),
        device=device,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        attention_backend=dry.BACKEND if is_dry else "auto",
        **settings,
    )
    exact, in_bfloat16 = (_peer_logits(folder, dtype, config, token_ids) for dtype in (torch.float32, torch.bfloat16))
    limit = max(2 * relative_error(in_bfloat16, exact), LEAST_LIMIT, QUANTISED_LIMIT.get(config.quantization, 0))
    own = _logits(config, token_ids)
    bench.check(f"{what}, prefill", relative_error(own[:, :-1], exact[:, :-1]), limit)
    bench.check(f"{what}, decode", relative_error(own[:, -1], exact[:, -1]), limit)


def _write_random_model(folder: Path, family: str, is_dry: bool) -> None:
    """Weights that bfloat16 holds; norms and biases random too, so that none can be left out."""
    torch.manual_seed(0)
    config_class, options = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(config_class(**(DRY if is_dry else SMALL) | options))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.3, 1.7)
        elif name.endswith(".bias"):
            parameter.data.normal_(0.0, 0.5)
        parameter.data = parameter.data.bfloat16()
    model.save_pretrained(folder)


def _peer_logits(folder: Path, dtype: torch.dtype, config: EngineConfig, token_ids: Tensor) -> Tensor:
    """Of transformers with the weights that `config` rounds to, float32 [num_seqs, length, vocab_size]"""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if config.quantization != "auto":
        parameters, checkpoint = dict(model.named_parameters()), open_checkpoint(folder)
        precision = Precision(config.quantization, keeps_float8=True)
        for module in filter(lambda module: module.is_linear, modules(checkpoint.config)):
            for name, form in zip(module.stored, precision.forms(checkpoint, module) or (), strict=False):
                parameters[f"{name}.weight"].data.copy_(_rounded(checkpoint.tensors[f"{name}.weight"], form))
    return model.to(config.device).eval()(token_ids.to(config.device)).logits.float()


def _rounded(stored: StoredTensor, form: str) -> Tensor:
    if form != ROUNDED_FLOAT8:
        return read_quantised([stored], [form]).dequantise()
    exact = torch.empty(stored.shape, dtype=torch.bfloat16)
    read_into(exact, stored)
    return Float8Weight.round(exact).dequantise()


def _logits(settings: EngineConfig, token_ids: Tensor) -> Tensor:
    """int64 [num_seqs, length] -> [num_seqs, length, vocab_size]; the last token of each in a step of its own."""
    num_seqs, length = token_ids.shape
    token_ids = token_ids.to(settings.device)
    model = load_model(settings, open_checkpoint(settings.model))
    model.backend.allocate(1 + num_seqs * -(-length // settings.block_size))
    prompts = Steps(model, num_seqs=num_seqs, seq_len=length - 1, query_len=length - 1)
    hidden = prompts.forward(token_ids[:, :-1].flatten(), prompts.all_rows)
    prompt_logits = prompts.decoder.compute_logits(hidden).clone()
    last = Steps(model, num_seqs=num_seqs, seq_len=length, query_len=1)
    last_logits = last.decoder.compute_logits(last.forward(token_ids[:, -1].contiguous(), last.all_rows))
    return torch.cat((prompt_logits.view(num_seqs, length - 1, -1), last_logits[:, None]), dim=1)
