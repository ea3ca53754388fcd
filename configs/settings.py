"""Settings of the three layers. Each layer accepts the whole object and is typed to what it may see:

    SchedulerConfig  ⊂  EngineConfig  ⊂  ServerConfig

Every field is a TOML key, an environment variable (OCTAVO_MAX_NUM_SEQS) and a flag (--max-num-seqs) of the
same name, read by `configs/sources.py`. A value of None means "decided at start from the checkpoint or machine".
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one step and of the cache."""

    max_num_seqs: Annotated[int, Meta(ge=1, description="Most requests in one step.")] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="Token budget of one step; longer prompts are computed in chunks.")
    ] = 512
    max_model_len: Annotated[
        Positive | None,
        Meta(description="Most tokens of prompt and output together (default: the checkpoint's)."),
    ] = None
    block_size: Annotated[int, Meta(ge=1, description="Tokens in one block of the KV cache.")] = 16
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of equal prefixes.")] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(description="Who runs first: the oldest request, or the one with the lowest `priority` number."),
    ] = "fcfs"


class EngineConfig(SchedulerConfig, frozen=True, kw_only=True):
    """One model on one device."""

    model: Annotated[
        str, Meta(description="A Hugging Face folder, a GGUF file, or `smollm2` for the bundled checkpoint.")
    ] = "smollm2"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Type of weights and KV cache; auto follows the checkpoint and the machine."),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4"],
        Meta(
            description="Weights of linear layers: int8 and int4 quantise at load; auto keeps a GGUF file's own form"
            " where the dtype is bfloat16; none computes with the dtype."
        ),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto takes a GPU where there is one.")] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"],
        Meta(description="int8 keeps nearly twice the tokens of bfloat16 in the same memory; auto follows the dtype."),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Meta(description="auto takes the fastest that supports the model; a name is refused with reasons."),
    ] = "auto"
    num_threads: Annotated[
        Positive | None,
        Meta(description="CPU threads of the engine (default: the cores that the process may use)."),
    ] = None
    kv_cache_tokens: Annotated[
        Positive | None,
        Meta(description="Tokens that the KV cache holds (default: from kv_cache_memory_fraction)."),
    ] = None
    kv_cache_memory_fraction: Annotated[
        float, Meta(gt=0, le=1, description="Share of the free memory that the KV cache takes.")
    ] = 0.25
    seed: Annotated[int, Meta(description="Seeds the requests that bring no seed of their own.")] = 0
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(description="auto: sampling fields that a request leaves out come from generation_config.json."),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="File with a Jinja chat template that replaces the checkpoint's.")
    ] = None


class ServerConfig(EngineConfig, frozen=True, kw_only=True):
    """The HTTP face."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    served_model_name: Annotated[
        str | None, Meta(description="Name that clients use (default: the model's folder or file name).")
    ] = None
    max_body_bytes: Annotated[
        int, Meta(ge=1, description="Largest request body; a larger one is answered with 413.")
    ] = 32 * 2**20
    max_choices: Annotated[int, Meta(ge=1, description="Most choices of one request: its prompts times `n`.")] = 1024
    max_stop_strings: Annotated[int, Meta(ge=1, description="Most `stop` strings of one request.")] = 16
    max_stop_chars: Annotated[int, Meta(ge=1, description="Most characters of one `stop` string.")] = 1024
    trust_request_chat_template: Annotated[
        bool,
        Meta(description="Take `chat_template` from requests: it is a program, which may use up time and memory."),
    ] = False
    strict_fields: Annotated[
        bool, Meta(description="Refuse request fields that no route knows, instead of ignoring and reporting them.")
    ] = False
    stream_interval: Annotated[
        int, Meta(ge=1, description="Streams send a choice's text every so many tokens; the first comes at once.")
    ] = 1
    sse_keep_alive_interval: Annotated[
        float, Meta(ge=0, description="Seconds without an event after which a stream sends a comment; 0: none.")
    ] = 0
    enable_force_include_usage: Annotated[
        bool, Meta(description="Every stream ends with its usage, as if stream_options.include_usage were set.")
    ] = False
    pooling: Annotated[
        Literal["last", "mean"],
        Meta(description="Embeddings are the last token's final hidden state, or the mean of all."),
    ] = "last"
    max_stored_responses: Annotated[
        int, Meta(ge=0, description="Most finished responses of /v1/responses that are kept to be continued.")
    ] = 1000
    max_stored_response_bytes: Annotated[
        int, Meta(ge=0, description="Most bytes that those responses take, each with the conversation before it.")
    ] = 256 * 2**20
    tool_call_parser: Annotated[
        Literal[
            "auto", "hermes", "llama3_json", "mistral", "mistral_named", "pythonic", "pythonic_tagged", "qwen3_coder"
        ],
        Meta(description="How the model writes tool calls; auto tells it by the chat template."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think"],
        Meta(description="Whether the answer's `<think>` part is split off; auto tells it by the chat template."),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe lines that are logged.")
    ] = "info"
