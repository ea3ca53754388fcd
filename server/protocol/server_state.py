"""What the server says about itself."""

import msgspec


class Health(msgspec.Struct, frozen=True):
    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    version: str


class Load(msgspec.Struct, frozen=True):
    server_load: int
    """Requests with a body that are being answered now."""


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
