"""Networks whose speed is measured, as their config.json gives them, and tiny ones for a dry run."""

from typing import Any

from engine.models.config import ModelConfig

_LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0, "original_max_position_embeddings": 8192},
    "tie_word_embeddings": False,
}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0, "original_max_position_embeddings": 8192},
    "tie_word_embeddings": True,
}
QWEN3_600M: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_DRY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_scaling": None,
}
DRY_LLAMA, DRY_QWEN3 = LLAMA_1B | _DRY, QWEN3_600M | _DRY


def layer_parameters(config: ModelConfig, num_parameters: int) -> int:
    """All but the embedding table and the head, which may be one."""
    return num_parameters - config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)


def weight_bytes(config: ModelConfig, num_parameters: int, layers_element: int, head_element: int) -> int:
    """Read in every step: the layers and the head; of the embedding table a step needs a few rows."""
    head = config.vocab_size * config.hidden_size
    return layer_parameters(config, num_parameters) * layers_element + head * head_element


def kv_bytes(config: ModelConfig, element: int) -> int:
    """Of one token, in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * element


def prefill_operations(config: ModelConfig, num_parameters: int, lengths: list[int]) -> float:
    """Of prompts whose last token alone has logits: two per weight and token, and attention to all earlier tokens."""
    table = config.vocab_size * config.hidden_size
    in_layers = layer_parameters(config, num_parameters)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    return sum(2.0 * in_layers * n + 2.0 * table + attention * n * (n + 1) / 2 for n in lengths)
