"""How many blocks the KV cache gets. The backend owns the storage and its layout, the scheduler the blocks."""

from configs.errors import SettingsError

from .device import ResolvedConfig

MAX_TOKENS = 2**19
"""On a CPU a larger cache serves no batch that one process can keep busy."""


def plan_num_blocks(
    config: ResolvedConfig, *, block_bytes: int, max_model_len: int, free_bytes: int
) -> tuple[int, list[str]]:
    """Blocks of the cache, the reserved block 0 included, and notes for the start-up message.

    `kv_cache_tokens` decides; else a share of the free memory, but no more than the largest batch can fill.
    Raises `SettingsError` when not even one block fits, or `kv_cache_tokens` exceed the free memory.
    """
    if config.kv_cache_tokens is None:
        most_tokens = config.max_num_seqs * max_model_len
        if config.device == "cpu":
            most_tokens = min(most_tokens, MAX_TOKENS)
        share = int(free_bytes * config.kv_cache_memory_fraction)
        num_blocks = min(share // block_bytes, -(-most_tokens // config.block_size))
    else:
        num_blocks = config.kv_cache_tokens // config.block_size
    if num_blocks < 1:
        mend = "raise kv_cache_tokens or kv_cache_memory_fraction"
        if free_bytes < block_bytes:
            mend = f"{free_bytes} bytes are free; lower max_num_batched_tokens or max_num_seqs"
        size = f"one block of {config.block_size} tokens ({block_bytes} bytes)"
        raise SettingsError(f"the KV cache cannot hold {size}: {mend}")
    if num_blocks * block_bytes > free_bytes:
        raise SettingsError(
            f"kv_cache_tokens {config.kv_cache_tokens} takes {num_blocks * block_bytes / 2**30:.1f} GiB, "
            f"but {free_bytes / 2**30:.1f} GiB are free"
        )
    notes = []
    num_tokens = num_blocks * config.block_size
    if num_tokens < max_model_len:
        notes.append(f"the KV cache holds {num_tokens} tokens: no request can use the whole context of {max_model_len}")
    return num_blocks + 1, notes
