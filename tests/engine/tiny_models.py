"""Tiny random checkpoints, written by transformers, which is also the oracle of their logits.

model = write_tiny(folder)                                a Llama with a byte tokenizer and a chat template
model = write_tiny(folder, "qwen3", head_dim=32)          another family, with changed configuration
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2; the 256 bytes follow
EOS_TOKEN_ID = 2
VOCAB_SIZE = 272

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "initializer_range": 0.12,
}
"""For all families; what one has not, stands in its config.json without effect."""


def tiny_model(family: str = "llama", *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Random weights, float32, eager attention. Biases and norms are random too, so that none can be left out."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **SMALL | config), attn_implementation="eager"
    )
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
                parameter.uniform_(0.3, 1.7)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.5)
    return model


def write_tiny(
    folder: Path, family: str = "llama", *, seed: int = 0, max_shard_size: str = "5GB", **config: Any
) -> PreTrainedModel:
    """Write config.json, safetensors and a tokenizer to `folder`; returns the model that they came from."""
    model = tiny_model(family, seed=seed, **config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: every byte of the text is one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
