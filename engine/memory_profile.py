"""What a GPU's memory leaves for the KV cache, found by making the largest step once."""

import numpy as np
import torch
from torch import Tensor

from configs.errors import SettingsError
from configs.sampling import SamplingParams

from .attention.metadata import AttentionMetadata
from .decode_graphs import GraphInputs, StepTensors, graph_sizes
from .device import ResolvedConfig, free_memory
from .loading import LoadedModel
from .sampler import sample
from .sampling_rows import SamplingRows
from .transfer import upload

GRAPH_BYTES = 16 * 2**20
"""What the driver keeps of one captured step, besides the pool of all of them; an estimate."""


def measured_free_bytes(model: LoadedModel, config: ResolvedConfig, max_model_len: int) -> int:
    """Bytes for the KV cache: on a CPU the free memory, which steps share; on a GPU what is free while torch still
    holds all that the largest step took, less the room of the CUDA graphs.

    The backend's cache is one block afterwards. Raises `SettingsError` when the step does not fit the GPU.
    """
    device = model.spec.device
    if device.type != "cuda":
        return free_memory(device)
    torch.cuda.empty_cache()  # else what loading gave back would count as the step's
    model.backend.allocate(1)
    try:
        run_largest_step(model, config, max_model_len)
        free_bytes = free_memory(device) - _graph_bytes(model, config, max_model_len)
    except torch.OutOfMemoryError as error:
        raise SettingsError(
            f"a step of {config.max_num_batched_tokens} tokens and {config.max_num_seqs} requests does not fit the GPU"
            " beside the weights; lower max_num_batched_tokens or max_num_seqs"
        ) from error
    torch.cuda.empty_cache()
    return max(0, free_bytes)


@torch.inference_mode()
def run_largest_step(model: LoadedModel, config: ResolvedConfig, max_model_len: int) -> None:
    """As many tokens and requests as a step may have, each of which samples in every way that takes memory. Nothing is
    stored: the KV cache may be the reserved block alone."""
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
    num_seqs = min(config.max_num_seqs, num_tokens)
    starts = np.arange(num_seqs + 1) * num_tokens // num_seqs
    step = _step(starts, model)
    model.backend.prepare(step.metadata)
    logits = _logits(model, step, starts[1:] - 1)
    ops, vocab_size = model.decoder.ops, model.decoder.config.vocab_size
    rows = SamplingRows(num_seqs, ops.make_penalties(vocab_size, model.spec.device))
    params = SamplingParams(temperature=1.0, top_p=0.999, min_p=1e-9, logprobs=20, repetition_penalty=1.1)
    nobody = np.zeros(0, np.int64)
    for row in range(num_seqs):
        rows.put(
            row, params, seed=row, stop_token_ids=(), prompt_token_ids=np.zeros(1, np.int64), output_token_ids=nobody
        )
    sample(logits, rows, np.arange(num_seqs), ops).wait()


@torch.inference_mode()
def _graph_bytes(model: LoadedModel, config: ResolvedConfig, max_model_len: int) -> int:
    """Their pool is as large as the largest graph needs, and one result is kept."""
    if not (config.cuda_graphs and model.backend.captures_decode):
        return 0
    spec, sizes = model.spec, graph_sizes(config.max_num_seqs)
    max_blocks = -(-max_model_len // spec.block_size)
    step = GraphInputs(sizes[-1], max_blocks, max_model_len, spec.device).rows(sizes[-1])
    torch.cuda.reset_peak_memory_stats(spec.device)
    before = torch.cuda.memory_allocated(spec.device)
    model.backend.prepare(step.metadata)
    logits = _logits(model, step, np.arange(sizes[-1]))
    taken = torch.cuda.max_memory_allocated(spec.device) - before
    return taken + logits.nbytes + len(sizes) * GRAPH_BYTES


def _step(starts: np.ndarray, model: LoadedModel) -> StepTensors:
    """Sequences from their first token on: those of one are starts[i] … starts[i + 1]."""
    spec, lengths = model.spec, np.diff(starts)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    metadata = AttentionMetadata.from_host(
        query_start_loc=starts.astype(np.int32),
        seq_lens=lengths.astype(np.int32),
        block_table=np.zeros((len(lengths), -(-int(lengths.max()) // spec.block_size)), np.int32),
        slot_mapping=np.full(len(positions), -1, np.int64),
        device=spec.device,
    )
    token_ids, positions, rope_lengths = upload((np.zeros_like(positions), positions, positions + 1), spec.device)
    return StepTensors(token_ids, positions, rope_lengths, metadata)


def _logits(model: LoadedModel, step: StepTensors, wanted: np.ndarray) -> Tensor:
    """Of the tokens `wanted`, for a step that is prepared."""
    [rows] = upload([wanted], model.spec.device)
    hidden = model.decoder.forward(step.token_ids, step.positions, step.rope_lengths, rows, model.backend)
    return model.decoder.compute_logits(hidden)
