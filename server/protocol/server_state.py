"""What the server says about itself."""

from typing import Literal

import msgspec


class Health(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times are seconds."""

    status: Literal["ok", "restarting", "frozen", "stuck", "dead", "draining"]
    reason: str = ""
    """Where the status is not `ok`."""
    beat_age: float
    """Since the engine process showed that it runs."""
    step_age: float
    """Of the step that the engine is at; 0 between steps."""
    num_steps: int
    """Of this engine process."""


class Entrance(msgspec.Struct, frozen=True, kw_only=True):
    """Where to look; nothing of what is served, since it is answered without a key."""

    name: str = "Octavo"
    openapi: str = "/openapi.json"
    health: str = "/health"


class Version(msgspec.Struct, frozen=True):
    version: str


class Load(msgspec.Struct, frozen=True):
    server_load: int
    """Requests with a body that are being answered now, and responses in the background."""


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client without a tokenizer of its own may want to know of the server's."""

    tokenizer_class: str = "octavo"
    vocab_size: int
    model_max_length: int
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """No paths and no settings: they may tell secrets."""

    version: str
    model: str
    """The served name."""
    architecture: str
    num_parameters: int
    max_model_len: int
    vocab_size: int
    dtype: str
    quantization: str
    device: str
    attention_backend: str
    num_threads: int
    kv_cache_dtype: str
    kv_cache_tokens: int
    """Tokens that the KV cache holds."""
    block_size: int
    """Tokens in one block of the KV cache."""
