"""Steps of a `Decoder` without a scheduler: sequences of one length, each with blocks of its own.

blocks    | 0: reserved | sequence 0 | sequence 1 | …
"""

import numpy as np
import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata
from engine.loading import LoadedModel


class Steps:
    """The last `query_len` of `seq_len` tokens of each of `num_seqs` sequences, as one step."""

    def __init__(self, model: LoadedModel, *, num_seqs: int, seq_len: int, query_len: int) -> None:
        self.decoder, self.backend = model.decoder, model.backend
        block_size = model.spec.block_size
        self.num_blocks = -(-seq_len // block_size)
        table = 1 + torch.arange(num_seqs * self.num_blocks).view(num_seqs, self.num_blocks)
        positions = torch.arange(seq_len - query_len, seq_len)
        slots = table[:, positions // block_size] * block_size + positions % block_size
        device = model.spec.device
        self.positions = positions.repeat(num_seqs).to(device)
        self.rope_lengths = torch.full_like(self.positions, seq_len)
        self.all_rows = torch.arange(num_seqs * query_len, device=device)
        self.last_rows = torch.arange(1, num_seqs + 1, device=device) * query_len - 1
        self.metadata = AttentionMetadata.from_host(
            query_start_loc=np.arange(0, (num_seqs + 1) * query_len, query_len, dtype=np.int32),
            seq_lens=np.full(num_seqs, seq_len, np.int32),
            block_table=table.int().numpy(),
            slot_mapping=slots.flatten().numpy(),
            device=device,
        )

    def forward(self, token_ids: Tensor, wanted: Tensor) -> Tensor:
        """int64 [num_seqs * query_len] -> hidden states of the tokens `wanted`: [rows, hidden_size]"""
        self.backend.prepare(self.metadata)
        return self.decoder.forward(token_ids, self.positions, self.rope_lengths, wanted, self.backend)
