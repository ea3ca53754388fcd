"""Settings of the three layers. Each layer accepts the whole object and is typed to what it may see:

    SchedulerConfig  ⊂  EngineConfig  ⊂  ServerConfig

Every field is a TOML key, an environment variable (OCTAVO_MAX_NUM_SEQS) and a flag (--max-num-seqs) of the
same name, read by `configs/sources.py`. A value of None means "decided at start from the checkpoint or machine".
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
MAX_SECONDS = 10**8
"""Three years: more than anybody waits."""

DEFAULT_BLOCK_SIZE, DEFAULT_BATCHED_TOKENS = 16, 512
"""For `block_size` and `max_num_batched_tokens` where they are not set and the device asks for nothing else."""

SECRETS = frozenset({"api_key"})
"""Settings whose values nobody may see."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one step and of the cache."""

    max_num_seqs: Annotated[int, Meta(ge=1, description="Most requests in one step.")] = 256
    max_num_batched_tokens: Annotated[
        Positive | None,
        Meta(
            description="Token budget of one step; longer prompts are computed in chunks (default: 512 on a CPU, 8192"
            " on a GPU)."
        ),
    ] = None
    max_model_len: Annotated[
        Positive | None,
        Meta(description="Most tokens of prompt and output together (default: the checkpoint's)."),
    ] = None
    block_size: Annotated[
        Positive | None, Meta(description="Tokens in one block of the KV cache (default: 16 on a CPU, 64 on a GPU).")
    ] = None
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
        Literal["auto", "none", "int8", "int4", "fp8"],
        Meta(
            description="Weights of linear layers: int8, int4 and (on a GPU) fp8 quantise at load; auto keeps a GGUF"
            " file's own form, unless dtype is float32 by name; none computes with the dtype."
        ),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto takes a GPU where there is one.")] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8_e4m3", "fp8_e5m2"],
        Meta(
            description="8 bits keep nearly twice the tokens of bfloat16 in the same memory; auto follows the dtype."
            " fp8 needs a GPU."
        ),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Meta(description="auto takes the fastest that supports the model; a name is refused with reasons."),
    ] = "auto"
    cuda_graphs: Annotated[
        bool, Meta(description="On a GPU, replay decode steps from CUDA graphs, which are captured when first needed.")
    ] = True
    async_scheduling: Annotated[
        bool | None,
        Meta(description="Schedule and prepare a step while the one before it runs (default: on a GPU)."),
    ] = None
    torch_compile: Annotated[
        bool, Meta(description="Compile the layers by torch.compile, in place of the kernels made for the machine.")
    ] = False
    num_threads: Annotated[
        Positive | None,
        Meta(description="CPU threads of the engine (default: the cores that the process may use)."),
    ] = None
    kv_cache_tokens: Annotated[
        Positive | None,
        Meta(description="Tokens that the KV cache holds (default: from kv_cache_memory_fraction)."),
    ] = None
    kv_cache_memory_fraction: Annotated[
        Share | None,
        Meta(
            description="Share of the free memory that the KV cache takes (default: 0.25 on a CPU; on a GPU 0.9 of what"
            " the largest step leaves)."
        ),
    ] = None
    seed: Annotated[int, Meta(description="Seeds the requests that bring no seed of their own.")] = 0
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(description="auto: sampling fields that a request leaves out come from generation_config.json."),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="File with a Jinja chat template that replaces the checkpoint's.")
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe lines that are logged.")
    ] = "info"
    log_format: Annotated[
        Literal["console", "json"], Meta(description="Log lines for people, or a JSON object each.")
    ] = "console"


class ServerConfig(EngineConfig, frozen=True, kw_only=True):
    """The HTTP face."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    uds: Annotated[str | None, Meta(description="Unix socket to listen on, instead of host and port.")] = None
    served_model_name: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="Names that clients may use, the first of which is in answers; several may follow the flag"
            " (default: the model's folder or file name)."
        ),
    ] = None
    page: Annotated[bool, Meta(description="Answer browsers at / with a page to chat and to watch the engine.")] = True
    max_body_bytes: Annotated[
        int, Meta(ge=1, description="Largest request body; a larger one is answered with 413.")
    ] = 32 * 2**20
    max_choices: Annotated[int, Meta(ge=1, description="Most choices of one request: its prompts times `n`.")] = 1024
    max_stop_strings: Annotated[int, Meta(ge=1, description="Most `stop` strings of one request.")] = 256
    max_stop_chars: Annotated[
        int, Meta(ge=1, description="Most characters of a request's `stop` strings together.")
    ] = 4096
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
    ] = 15
    enable_force_include_usage: Annotated[
        bool, Meta(description="Every stream ends with its usage, as if stream_options.include_usage were set.")
    ] = False
    pooling: Annotated[
        Literal["auto", "last", "mean"],
        Meta(
            description="Embeddings: the last token's final hidden state, or the mean of all; auto asks the checkpoint."
        ),
    ] = "auto"
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
    request_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=MAX_SECONDS,
            description="Seconds after which a request ends with what it has; requests may ask for fewer (timeout_s);"
            " 0: no bound.",
        ),
    ] = 0
    max_queued_requests: Annotated[
        int, Meta(ge=1, description="Most choices of requests that wait for their first token; others get a 429.")
    ] = 8192
    max_queued_tokens: Annotated[
        int, Meta(ge=1, description="Most tokens in the prompts of those that wait; others get a 429.")
    ] = 8 * 2**20
    client_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=10**6,
            description="Seconds for which a client may take nothing of what it was sent; 0: as long as it likes.",
        ),
    ] = 120
    timeout_keep_alive: Annotated[
        int,
        Meta(ge=0, le=10**6, description="Seconds for which a connection without a request stays open."),
    ] = 75
    shutdown_timeout: Annotated[
        float,
        Meta(ge=0, le=MAX_SECONDS, description="Seconds that requests under way may go on after SIGTERM or Ctrl-C."),
    ] = 30
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="The server ends when the engine process ended so many times and once more without answering a"
            " request in between.",
        ),
    ] = 3
    restart_patience: Annotated[
        float,
        Meta(ge=0, le=3600, description="Seconds that requests wait for a new engine process before they get a 503."),
    ] = 5
    step_timeout: Annotated[
        float, Meta(gt=0, le=MAX_SECONDS, description="Seconds after which the engine's step counts as stuck.")
    ] = 300
    unresponsive_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=MAX_SECONDS,
            description="Seconds after which an engine process that is frozen or stuck is replaced; 0: never.",
        ),
    ] = 300
    api_key: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...] | None,
        Meta(
            description="Keys of which requests must bring one; may be repeated. Everybody on the machine can read a"
            " command line: prefer OCTAVO_API_KEY or a file."
        ),
    ] = None
    api_key_file: Annotated[str | None, Meta(description="File with such keys, one a line.")] = None
    metrics_without_key: Annotated[bool, Meta(description="Answer /metrics without a key.")] = False
    allowed_origins: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="Origins of the web pages that may use the server (CORS); may be repeated; * is all (default:"
            " with keys all, else those of this machine)."
        ),
    ] = None
    allowed_methods: Annotated[
        tuple[str, ...] | None, Meta(description="Methods that such pages may use (default: all).")
    ] = None
    allowed_headers: Annotated[
        tuple[str, ...] | None, Meta(description="Headers that such pages may send (default: all).")
    ] = None
    allow_credentials: Annotated[bool, Meta(description="Let browsers send such pages' cookies and logins.")] = False
    ssl_certfile: Annotated[
        str | None, Meta(description="Certificate chain in PEM form: the server speaks HTTPS, and no HTTP.")
    ] = None
    ssl_keyfile: Annotated[
        str | None, Meta(description="The certificate's private key (default: it is in ssl_certfile).")
    ] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="Certificates of those who sign clients' certificates, in PEM form.")
    ] = None
    ssl_cert_reqs: Annotated[
        int, Meta(ge=0, le=2, description="Clients' certificates: 0: not asked for, 1: may come, 2: must come.")
    ] = 0
    max_header_bytes: Annotated[
        int, Meta(ge=1, description="Most bytes of a request's target and headers; more are answered with 431.")
    ] = 64 * 2**10
    max_header_count: Annotated[
        int, Meta(ge=1, description="Most headers of a request; more are answered with 431.")
    ] = 256
    request_read_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=MAX_SECONDS,
            description="Seconds in which a request has to arrive; every 16 KB of it earn another one. Then it is"
            " answered with 408, or its connection closed where not even its head is there.",
        ),
    ] = 30
    max_connections: Annotated[
        Positive | None,
        Meta(
            description="Most open connections; then idle ones are closed (default: as many as there are file"
            " descriptors for).",
        ),
    ] = None
    max_kept_timelines: Annotated[
        int, Meta(ge=0, description="Most choices of ended requests that /v1/requests/{id} still tells of.")
    ] = 1000
    memory_bandwidth: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Gigabytes per second that the device can read, as `octavo bench kernels` measures it: /metrics"
            " then tells what share of it the steps reach.",
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(description="Send a trace of each request to this OpenTelemetry collector, http://HOST:4318/v1/traces."),
    ] = None

    def __repr__(self) -> str:
        hidden = {name: "..." for name in SECRETS if getattr(self, name)}
        shown: str = msgspec.Struct.__repr__(msgspec.structs.replace(self, **hidden) if hidden else self)
        return shown
