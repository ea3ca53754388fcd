"""Flags of vLLM's and llama.cpp's servers: taken, passed over with a word, or refused with a reason."""

from typing import NamedTuple

SAME: dict[str, tuple[str, ...]] = {
    "chat_template": ("--chat-template-file",),
    "log_level": ("--uvicorn-log-level",),
    "max_model_len": ("--ctx-size", "-c", "--max-seq-len"),
    "max_num_batched_tokens": ("--ubatch-size", "-ub"),
    "max_num_seqs": ("--parallel", "-np"),
    "num_threads": ("--threads", "-t"),
    "quantization": ("-q",),
    "reasoning_parser": ("--reasoning-format",),
    "seed": ("-s",),
    "served_model_name": ("--alias", "-a"),
    "ssl_certfile": ("--ssl-cert-file",),
    "ssl_keyfile": ("--ssl-key-file",),
}
"""Flags of other servers that mean the same as a setting, by the setting."""

FIXED: dict[str, tuple[str, bool | str]] = {
    "--enforce-eager": ("cuda_graphs", False),
    "--no-ui": ("page", False),
    "--no-webui": ("page", False),
    "--verbose": ("log_level", "debug"),
}
"""Flags without a value that stand for a setting and its value."""


class Foreign(NamedTuple):
    flags: str
    """Spellings of one flag with spaces between, and behind them the name of its value, in brackets where that may be
    left out."""
    answer: str
    """What is said behind the flag's name."""
    passing: tuple[str, ...] | None = None
    """Values that ask for nothing and pass in silence, where others are refused; None: none is, and all are told of."""


_NOT_NEEDED = "is not needed: "
_LOADED = "is not needed: a model is read from the given folder or file, in whatever form it is there"
_TEXT = "is not needed: models are served for text alone"
_ONE_DEVICE = "is not supported: a model is served by one device"
_PER_REQUEST = "is not a setting of the server: requests say it, or the checkpoint's generation_config.json"
_NO_LORA = "is not supported: there are no adapters; merge them into the checkpoint"
_NO_DRAFT = "is not supported: there is no speculative decoding"
_NO_DOWNLOAD = "is not supported: nothing is downloaded; give MODEL as a folder or a GGUF file"
_ROPE = "is not supported: positions are as the checkpoint says; change its config.json"
_LOGS = "is not needed: see --log-level and --log-format"
_IN_MEMORY = "is not needed: weights are mapped, and the whole model is on one device (see --device)"
_MEMORY = "means something else than any setting here: see --kv-cache-memory-fraction and --kv-cache-tokens"

FOREIGN = (
    # vLLM
    Foreign("--tensor-parallel-size -tp N", _ONE_DEVICE, ("1",)),
    Foreign("--pipeline-parallel-size -pp N", _ONE_DEVICE, ("1",)),
    Foreign("--data-parallel-size -dp N", _ONE_DEVICE, ("1",)),
    Foreign("--api-server-count N", "is not supported: one process answers", ("1",)),
    Foreign("--distributed-executor-backend X", "is not needed: one process computes"),
    Foreign("--enable-expert-parallel", "is not supported: there are no mixtures of experts", ()),
    Foreign("--gpu-memory-utilization X", _MEMORY, ()),
    Foreign("--kv-cache-memory-bytes N", _MEMORY, ()),
    Foreign("--num-gpu-blocks-override N", _MEMORY, ()),
    Foreign("--cpu-offload-gb N", _ONE_DEVICE, ("0",)),
    Foreign("--swap-space N", _NOT_NEEDED + "preempted requests are computed again"),
    Foreign("--tokenizer X", _NOT_NEEDED + "the checkpoint's own tokenizer is used"),
    Foreign("--tokenizer-mode X", _NOT_NEEDED + "the checkpoint's own tokenizer is used"),
    Foreign("--skip-tokenizer-init", "is not supported: see /inference/v1/generate for token ids", ()),
    Foreign("--trust-remote-code", _NOT_NEEDED + "no code of a checkpoint is run"),
    Foreign("--load-format X", _LOADED),
    Foreign("--config-format X", _LOADED),
    Foreign("--download-dir X", _LOADED),
    Foreign("--revision X", _NO_DOWNLOAD, ()),
    Foreign("--hf-token [X]", _LOADED),
    Foreign("--hf-overrides X", _ROPE, ("{}",)),
    Foreign("--rope-theta X", _ROPE, ()),
    Foreign("--enable-chunked-prefill", _NOT_NEEDED + "long prompts always run in chunks"),
    Foreign(
        "--no-enable-chunked-prefill", _NOT_NEEDED + "long prompts always run in chunks, without effect on answers"
    ),
    Foreign("--max-num-partial-prefills N", _NOT_NEEDED + "all prompts share the token budget"),
    Foreign("--num-scheduler-steps N", _NOT_NEEDED + "see --async-scheduling"),
    Foreign("--use-v2-block-manager", _NOT_NEEDED + "there is one kind of cache"),
    Foreign("--prefix-caching-hash-algo X", _NOT_NEEDED + "prefixes have cryptographic hashes"),
    Foreign("--compilation-config -O X", _NOT_NEEDED + "see --torch-compile and --cuda-graphs"),
    Foreign("--cuda-graph-sizes N", _NOT_NEEDED + "CUDA graphs are captured when first needed"),
    Foreign("--max-seq-len-to-capture N", _NOT_NEEDED + "CUDA graphs are captured when first needed"),
    Foreign("--enable-auto-tool-choice", _NOT_NEEDED + "tools are always taken; see --tool-call-parser"),
    Foreign("--enable-reasoning", _NOT_NEEDED + "see --reasoning-parser"),
    Foreign("--guided-decoding-backend X", _NOT_NEEDED + "grammars are compiled by xgrammar"),
    Foreign("--structured-outputs-config X", _NOT_NEEDED + "grammars are compiled by xgrammar"),
    Foreign("--chat-template-content-format X", _NOT_NEEDED + "it is told by the template"),
    Foreign("--response-role X", "is not supported: answers are the assistant's", ("assistant",)),
    Foreign("--return-tokens-as-token-ids", _PER_REQUEST, ()),
    Foreign("--override-generation-config X", _PER_REQUEST, ("{}",)),
    Foreign("--max-logprobs N", _NOT_NEEDED + "requests may ask for 20"),
    Foreign("--limit-mm-per-prompt X", _TEXT),
    Foreign("--mm-processor-kwargs X", _TEXT),
    Foreign("--language-model-only", _TEXT),
    Foreign("--task X", _NOT_NEEDED + "one server generates and embeds"),
    Foreign("--runner X", _NOT_NEEDED + "one server generates and embeds"),
    Foreign("--convert X", _NOT_NEEDED + "one server generates and embeds"),
    Foreign("--enable-lora", _NO_LORA, ()),
    Foreign("--lora-modules X", _NO_LORA, ()),
    Foreign("--speculative-config X", _NO_DRAFT, ()),
    Foreign("--speculative-model X", _NO_DRAFT, ()),
    Foreign("--num-speculative-tokens N", _NO_DRAFT, ("0",)),
    Foreign("--disable-log-requests", _LOGS),
    Foreign("--enable-log-requests", _LOGS),
    Foreign("--no-enable-log-requests", _LOGS),
    Foreign("--disable-log-stats", _LOGS),
    Foreign("--disable-uvicorn-access-log", _LOGS),
    Foreign("--max-log-len N", _NOT_NEEDED + "texts are never logged"),
    Foreign("--enable-request-id-headers", _NOT_NEEDED + "every answer has an X-Request-Id"),
    Foreign("--enable-server-load-tracking", _NOT_NEEDED + "/load always tells"),
    Foreign("--enable-tokenizer-info-endpoint", _NOT_NEEDED + "/tokenizer_info always tells"),
    Foreign("--disable-frontend-multiprocessing", _NOT_NEEDED + "the engine has a process of its own"),
    Foreign("--root-path X", "is not supported: let the proxy take it off the path", ("", "/")),
    # llama.cpp
    Foreign("--n-gpu-layers --gpu-layers -ngl N", _IN_MEMORY),
    Foreign("--mlock", _IN_MEMORY),
    Foreign("--mmap", _IN_MEMORY),
    Foreign("--no-mmap", _IN_MEMORY),
    Foreign("--no-kv-offload -nkvo", _IN_MEMORY),
    Foreign("--no-repack -nr", _IN_MEMORY),
    Foreign("--numa X", _NOT_NEEDED + "see --num-threads, and numactl"),
    Foreign("--main-gpu -mg N", _ONE_DEVICE, ("0",)),
    Foreign("--split-mode -sm X", _ONE_DEVICE, ("none",)),
    Foreign("--tensor-split -ts X", _ONE_DEVICE, ()),
    Foreign("--rpc X", _ONE_DEVICE, ()),
    Foreign("--flash-attn -fa [X]", _NOT_NEEDED + "see --attention-backend"),
    Foreign("--batch-size -b N", _NOT_NEEDED + "see --max-num-batched-tokens, which --ubatch-size sets"),
    Foreign("--threads-batch -tb N", _NOT_NEEDED + "prompts have the threads of --num-threads"),
    Foreign("--threads-http N", _NOT_NEEDED + "one thread answers all connections"),
    Foreign("--prio N", _NOT_NEEDED + "see nice(1)"),
    Foreign("--poll N", _NOT_NEEDED + "threads wait as they must"),
    Foreign("--cont-batching -cb", _NOT_NEEDED + "requests are always batched continuously"),
    Foreign("--no-cont-batching -nocb", "is not supported: requests are always batched continuously", ()),
    Foreign("--kv-unified -kvu", _NOT_NEEDED + "all requests share the cache"),
    Foreign("--cache-prompt", _NOT_NEEDED + "see --enable-prefix-caching"),
    Foreign("--cache-reuse N", _NOT_NEEDED + "see --enable-prefix-caching"),
    Foreign("--cache-ram -cram N", _NOT_NEEDED + "see --kv-cache-tokens"),
    Foreign("--cache-type-k -ctk X", "is --kv-cache-dtype here", ("f16", "bf16")),
    Foreign("--cache-type-v -ctv X", "is --kv-cache-dtype here", ("f16", "bf16")),
    Foreign("--context-shift", "is not supported: a context is never shifted", ()),
    Foreign("--no-context-shift", _NOT_NEEDED + "a context is never shifted"),
    Foreign("--keep N", _NOT_NEEDED + "a context is never shifted"),
    Foreign("--fit -fit [X]", _NOT_NEEDED + "see --kv-cache-memory-fraction"),
    Foreign("--no-warmup", _NOT_NEEDED + "there is no warm-up that could be left out"),
    Foreign("--warmup", _NOT_NEEDED + "there is no warm-up that could be left out"),
    Foreign("--jinja", _NOT_NEEDED + "chat templates are always Jinja"),
    Foreign("--no-jinja", "is not supported: chat templates are always Jinja", ()),
    Foreign("--reasoning-budget N", _PER_REQUEST, ("-1",)),
    Foreign("--embedding --embeddings", _NOT_NEEDED + "one server generates and embeds"),
    Foreign("--reranking --rerank", _NOT_NEEDED + "/rerank is always there"),
    Foreign("--metrics", _NOT_NEEDED + "/metrics is always there"),
    Foreign("--slots", _NOT_NEEDED + "/slots is always there"),
    Foreign("--no-slots", "is not supported: /slots is always there", ()),
    Foreign("--props", "is not supported: settings do not change while the server runs", ()),
    Foreign("--webui --ui", _NOT_NEEDED + "see --page"),
    Foreign(
        "--timeout -to N", "means something else than any setting here: see --request-timeout, --client-timeout", ()
    ),
    Foreign("--n-predict --predict -n N", _PER_REQUEST, ("-1", "-2")),
    Foreign("--temperature --temp X", _PER_REQUEST, ()),
    Foreign("--top-k N", _PER_REQUEST, ()),
    Foreign("--top-p X", _PER_REQUEST, ()),
    Foreign("--min-p X", _PER_REQUEST, ()),
    Foreign("--repeat-penalty X", _PER_REQUEST, ("1", "1.0")),
    Foreign("--presence-penalty X", _PER_REQUEST, ("0", "0.0")),
    Foreign("--grammar X", _PER_REQUEST, ()),
    Foreign("--json-schema -j X", _PER_REQUEST, ()),
    Foreign("--model-url -mu X", _NO_DOWNLOAD, ()),
    Foreign("--hf-repo -hf -hfr X", _NO_DOWNLOAD, ()),
    Foreign("--hf-file -hff X", _NO_DOWNLOAD, ()),
    Foreign("--offline", _NOT_NEEDED + "nothing is downloaded"),
    Foreign("--mmproj -mm X", "is not supported: models are served for text alone", ()),
    Foreign("--no-mmproj", _TEXT),
    Foreign("--lora X", _NO_LORA, ()),
    Foreign("--model-draft -md X", _NO_DRAFT, ()),
    Foreign("--draft-max --draft -draft N", _NO_DRAFT, ()),
    Foreign("--rope-scaling X", _ROPE, ()),
    Foreign("--rope-scale X", _ROPE, ()),
    Foreign("--rope-freq-base X", _ROPE, ("0",)),
    Foreign("--rope-freq-scale X", _ROPE, ("1", "1.0")),
    Foreign("--override-kv X", "is not supported: the file's own values count", ()),
    Foreign("--log-disable", _LOGS),
    Foreign("--log-file X", _LOGS),
    Foreign("--verbosity --log-verbosity -lv N", _LOGS),
)
