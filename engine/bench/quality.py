"""What a model loses by its type and its quantization: the distributions of the next token, on a text.

P is the model in float32 with dequantised weights, Q the model as the settings ask for it. Both read the text in
windows, each from an empty context, and give a distribution at every position.
"""

from typing import Any

import msgspec
import torch
from torch import Tensor

from configs.errors import UsageError
from configs.settings import EngineConfig
from engine.bundled import locate_model
from engine.checkpoints import open_checkpoint
from engine.device import set_threads
from engine.loading import LoadedModel, load_model
from engine.machine import usable_cores
from engine.text.tokenizer import load_tokenizer

from .steps import Steps

ROWS_AT_ONCE = 64
"""Positions whose distributions are compared together: a few hundred bytes per word of the vocabulary each."""


@torch.inference_mode()
def measure(config: EngineConfig, *, text: str, window: int) -> dict[str, Any]:
    """Raises `UsageError` when the text is shorter than two tokens."""
    num_threads = config.num_threads or usable_cores()
    set_threads(num_threads)
    checkpoint = open_checkpoint(locate_model(config.model))
    token_ids = torch.tensor(load_tokenizer(checkpoint).encode(text, True))
    window = min(window, checkpoint.config.max_position_embeddings)
    pieces = [piece for piece in token_ids.split(window) if len(piece) > 1]
    if not pieces:
        raise UsageError("the text and the window have to hold two tokens at least")
    plain = msgspec.structs.replace(config, dtype="float32", quantization="none", kv_cache_dtype="auto")
    exact = load_model(plain, checkpoint)
    served = load_model(config, checkpoint)
    for model in (exact, served):
        model.backend.allocate(1 + -(-window // model.spec.block_size))
    columns = [compare(exact, served, piece) for piece in pieces]
    divergence, exact_loss, loss, same = (torch.cat(parts) for parts in zip(*columns, strict=True))
    return {
        "positions": len(divergence),
        "window": window,
        "kl_divergence": divergence.mean().item(),
        "kl_divergence_p99": divergence.quantile(0.99).item(),
        "same_likeliest": same.double().mean().item(),
        "perplexity_float32": exact_loss.mean().exp().item(),
        "perplexity": loss.mean().exp().item(),
        "dtype": str(served.spec.dtype).removeprefix("torch."),
        "quantization": served.quantization,
        "num_threads": num_threads,
    }


def compare(exact: LoadedModel, served: LoadedModel, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """At each position but the last, [len(token_ids) - 1]: KL(P || Q), and the losses of P and of Q on the token that
    follows, float64 in nats; and bool, whether both hold the same token for the likeliest."""
    steps = [Steps(model, num_seqs=1, seq_len=len(token_ids), query_len=len(token_ids)) for model in (exact, served)]
    hidden = [step.forward(token_ids, step.all_rows[:-1]).clone() for step in steps]
    parts = []
    for begin in range(0, len(token_ids) - 1, ROWS_AT_ONCE):
        end = min(begin + ROWS_AT_ONCE, len(token_ids) - 1)
        log_p, log_q = (
            step.decoder.compute_logits(states[begin:end]).double().log_softmax(dim=-1)
            for step, states in zip(steps, hidden, strict=True)
        )
        following = token_ids[begin + 1 : end + 1, None]
        parts.append(
            (
                (log_p.exp() * (log_p - log_q)).sum(dim=-1),
                -log_p.gather(1, following)[:, 0],
                -log_q.gather(1, following)[:, 0],
                log_p.argmax(dim=-1) == log_q.argmax(dim=-1),
            )
        )
    divergence, exact_loss, loss, same = (torch.cat(column) for column in zip(*parts, strict=True))
    return divergence, exact_loss, loss, same
