"""Runs a Decoder over a paged cache as the engine would: any mix of chunks and decodes in one step."""

from pathlib import Path

import torch
from torch import Tensor

from engine.attention.metadata import AttentionBackend, AttentionMetadata, AttentionSpec
from engine.attention.torch_reference import TorchReferenceAttention
from engine.checkpoints import open_checkpoint
from engine.kernels.ops import Ops
from engine.kernels.torch_ops import TorchOps
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.weights.loader import load_decoder

BLOCK_SIZE = 16


def torch_ops(config: ModelConfig) -> TorchOps:
    return TorchOps(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.rms_norm_eps,
        form=config.form,
    )


def load(path: Path, dtype: torch.dtype = torch.float32, ops: Ops | None = None) -> Decoder:
    checkpoint = open_checkpoint(path)
    return load_decoder(checkpoint, ops or torch_ops(checkpoint.config), dtype)


class PagedRun:
    """Sequences by number; their blocks are interleaved, so that no sequence owns neighbouring blocks.

    `prompts[s]` counts as the prompt of sequence s, however it is cut into chunks.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: list[list[int]],
        backend: type[AttentionBackend] = TorchReferenceAttention,
        max_len: int = 1024,
    ) -> None:
        config = decoder.config
        spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
            device=torch.device("cpu"),
            block_size=BLOCK_SIZE,
            windows=tuple(config.window(layer) for layer in range(config.num_layers)),
            scale=config.score_scale,
            softcap=config.attention_softcap,
        )
        self.decoder, self.prompts = decoder, prompts
        self.backend = backend(spec)
        blocks_per_seq = -(-max_len // BLOCK_SIZE)
        cache = self.backend.allocate(1 + blocks_per_seq * len(prompts))
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(float("nan"))  # nobody may look at what has not been written
        self.blocks = 1 + torch.arange(blocks_per_seq * len(prompts)).view(blocks_per_seq, len(prompts)).T.flip(1)
        self.computed = [0] * len(prompts)

    def step(self, tokens: dict[int, list[int]]) -> dict[int, Tensor]:
        """Sequence -> its new tokens; returns sequence -> logits of each of them."""
        seqs = list(tokens)
        query_lens = [len(tokens[seq]) for seq in seqs]
        positions = [torch.arange(self.computed[seq], self.computed[seq] + len(tokens[seq])) for seq in seqs]
        for seq in seqs:
            self.computed[seq] += len(tokens[seq])
        seq_lens = torch.tensor([self.computed[seq] for seq in seqs], dtype=torch.int32)
        max_blocks = -(-int(seq_lens.max()) // BLOCK_SIZE)
        slots = [
            self.blocks[seq][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            for seq, place in zip(seqs, positions, strict=True)
        ]
        lengths = [(place + 1).clamp(min=len(self.prompts[seq])) for seq, place in zip(seqs, positions, strict=True)]
        self.backend.prepare(
            AttentionMetadata.from_host(
                query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int().numpy(),
                seq_lens=seq_lens.numpy(),
                block_table=self.blocks[seqs][:, :max_blocks].int().numpy(),
                slot_mapping=torch.cat(slots).numpy(),
            )
        )
        token_ids = torch.tensor([token for seq in seqs for token in tokens[seq]])
        every = torch.arange(len(token_ids))
        hidden = self.decoder.forward(token_ids, torch.cat(positions), torch.cat(lengths), every, self.backend)
        logits = self.decoder.compute_logits(hidden).clone()  # the next step may reuse the buffer
        return dict(zip(seqs, logits.split(query_lens), strict=True))


def prefill(decoder: Decoder, prompt: list[int]) -> Tensor:
    """Logits of every position [len(prompt), vocab_size]."""
    return PagedRun(decoder, [prompt]).step({0: prompt})[0]
