"""Command-line flags made from the settings' fields, so that names, types and texts have one source;
and those of vLLM's and llama.cpp's servers, which are taken, passed over with a word, or refused with a reason."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import msgspec
from msgspec import Meta

from configs.errors import UsageError
from configs.settings import SchedulerConfig
from configs.sources import OTHER_WORDS, did_you_mean, plain_type, preset_names

SAME = {
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

# A flag's spellings are written as `--name|-n`, followed by `=` where it takes a value and by `?` where it may.

_NOT_NEEDED = {
    "one process computes": "--distributed-executor-backend=",
    "preempted requests are computed again": "--swap-space=",
    "the checkpoint's own tokenizer is used": "--tokenizer= --tokenizer-mode=",
    "no code of a checkpoint is run": "--trust-remote-code",
    "nothing is downloaded": "--offline",
    "a model is read as it is in its folder or file": "--load-format= --config-format= --download-dir= --hf-token?",
    "weights are mapped, and the whole model is on one device (see --device)": (
        "--n-gpu-layers|--gpu-layers|-ngl= --mlock --mmap --no-mmap --no-kv-offload|-nkvo --no-repack|-nr"
    ),
    "models take texts alone": "--limit-mm-per-prompt= --mm-processor-kwargs= --language-model-only --no-mmproj",
    "one server generates and embeds": "--task= --runner= --convert= --embedding|--embeddings",
    "long prompts always run in chunks": "--enable-chunked-prefill --no-enable-chunked-prefill",
    "all prompts share the token budget": "--max-num-partial-prefills=",
    "requests are always batched continuously": "--cont-batching|-cb",
    "there is one kind of cache": "--use-v2-block-manager",
    "all requests share the cache": "--kv-unified|-kvu",
    "a context is never shifted": "--no-context-shift --keep=",
    "prefixes have cryptographic hashes": "--prefix-caching-hash-algo=",
    "CUDA graphs are captured when first needed": "--cuda-graph-sizes= --max-seq-len-to-capture=",
    "there is no warm-up that could be left out": "--no-warmup --warmup",
    "grammars are compiled by xgrammar": "--guided-decoding-backend= --structured-outputs-config=",
    "tools are always taken; see --tool-call-parser": "--enable-auto-tool-choice",
    "chat templates are always Jinja": "--jinja",
    "it is told by the template": "--chat-template-content-format=",
    "requests may ask for 20": "--max-logprobs=",
    "texts are never logged": "--max-log-len=",
    "every answer has an X-Request-Id": "--enable-request-id-headers",
    "the engine has a process of its own": "--disable-frontend-multiprocessing",
    "one thread answers all connections": "--threads-http=",
    "threads wait as they must": "--poll=",
    "prompts have the threads of --num-threads": "--threads-batch|-tb=",
    "/load, /metrics, /rerank, /slots and /tokenizer_info are always there": (
        "--enable-server-load-tracking --metrics --reranking|--rerank --slots --enable-tokenizer-info-endpoint"
    ),
    "see --log-level and --log-format": (
        "--disable-log-requests --enable-log-requests --no-enable-log-requests --disable-log-stats --log-disable"
        " --disable-uvicorn-access-log --log-file= --verbosity|--log-verbosity|-lv="
    ),
    "see --async-scheduling": "--num-scheduler-steps=",
    "see --attention-backend": "--flash-attn|-fa?",
    "see --enable-prefix-caching": "--cache-prompt --cache-reuse=",
    "see --kv-cache-memory-fraction": "--fit|-fit?",
    "see --kv-cache-tokens": "--cache-ram|-cram=",
    "see --max-num-batched-tokens, which --ubatch-size sets": "--batch-size|-b=",
    "see --num-threads, and numactl": "--numa=",
    "see --page": "--webui|--ui",
    "see --reasoning-parser": "--enable-reasoning",
    "see --torch-compile and --cuda-graphs": "--compilation-config|-O=",
    "see nice(1)": "--prio=",
}
"""Passed over: reasons, and the flags that they hold for."""

_REFUSED = {
    "is not a setting of the server: requests say it, or the checkpoint's generation_config.json": (
        "--n-predict|--predict|-n=-1,-2 --temperature|--temp= --top-k= --top-p= --min-p= --repeat-penalty=1,1.0"
        " --presence-penalty=0,0.0 --grammar= --json-schema|-j= --reasoning-budget=-1"
        " --override-generation-config={} --return-tokens-as-token-ids"
    ),
    "is not supported: a model is served by one device": (
        "--tensor-parallel-size|-tp=1 --pipeline-parallel-size|-pp=1 --data-parallel-size|-dp=1 --cpu-offload-gb=0"
        " --main-gpu|-mg=0 --split-mode|-sm=none --tensor-split|-ts= --rpc="
    ),
    "is not supported: positions are as the checkpoint says; change its config.json": (
        "--hf-overrides={} --rope-theta= --rope-scaling= --rope-scale= --rope-freq-base=0 --rope-freq-scale=1,1.0"
    ),
    "is not supported: nothing is downloaded; give MODEL as a folder or a GGUF file": (
        "--revision= --model-url|-mu= --hf-repo|-hf|-hfr= --hf-file|-hff="
    ),
    "is not supported: there is no speculative decoding": (
        "--speculative-config= --speculative-model= --num-speculative-tokens=0 --model-draft|-md="
        " --draft-max|--draft|-draft="
    ),
    "means something else than any setting here: see --kv-cache-memory-fraction and --kv-cache-tokens": (
        "--gpu-memory-utilization= --kv-cache-memory-bytes= --num-gpu-blocks-override="
    ),
    "means something else than any setting here: see --request-timeout, --client-timeout": "--timeout|-to=",
    "is --kv-cache-dtype here": "--cache-type-k|-ctk=f16,bf16 --cache-type-v|-ctv=f16,bf16",
    "is not supported: there are no adapters; merge them into the checkpoint": "--enable-lora --lora-modules= --lora=",
    "is not supported: there are no mixtures of experts": "--enable-expert-parallel",
    "is not supported: models take texts alone": "--mmproj|-mm=",
    "is not supported: one process answers": "--api-server-count=1",
    "is not supported: answers are the assistant's": "--response-role=assistant",
    "is not supported: let the proxy take it off the path": "--root-path=,/",
    "is not supported: see /inference/v1/generate for token ids": "--skip-tokenizer-init",
    "is not supported: requests are always batched continuously": "--no-cont-batching|-nocb",
    "is not supported: a context is never shifted": "--context-shift",
    "is not supported: chat templates are always Jinja": "--no-jinja",
    "is not supported: /slots is always there": "--no-slots",
    "is not supported: settings do not change while the server runs": "--props",
    "is not supported: the file's own values count": "--override-kv=",
}
"""Refused: what is said behind the flag's name, and the flags; but for values behind `=`, which ask for nothing."""


class ForeignFlag(NamedTuple):
    names: list[str]
    nargs: Literal[0, "?"] | None
    """As argparse has it."""
    answer: str
    """What is said behind the flag's name."""
    neutral: list[str] | None
    """Values that are taken in silence, while others are refused. None: the flag is never refused."""


def _read(table: Mapping[str, str], *, is_refused: bool) -> Iterator[ForeignFlag]:
    for answer, flags in table.items():
        for names, sign, values in (flag.partition("=") for flag in flags.split()):
            nargs: Literal[0, "?"] | None = None if sign else "?" if names.endswith("?") else 0
            neutral = (values.split(",") if values else []) if is_refused else None
            said = answer if is_refused else f"is not needed: {answer}"
            yield ForeignFlag(names.rstrip("?").split("|"), nargs, said, neutral)


FOREIGN = [*_read(_REFUSED, is_refused=True), *_read(_NOT_NEEDED, is_refused=False)]

SAMPLING: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "metavar": "N", "help": "most tokens of one answer"},
    "temperature": {"type": float, "metavar": "X", "help": "0 is greedy"},
    "top_k": {"type": int, "metavar": "N", "help": "keep the N likeliest tokens"},
    "top_p": {"type": float, "metavar": "X", "help": "keep the likeliest tokens up to this probability"},
    "min_p": {"type": float, "metavar": "X", "help": "keep tokens this likely, relative to the likeliest"},
    "repetition_penalty": {"type": float, "metavar": "X", "help": "above 1 avoids repetition"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end before this text; may be repeated"},
}
"""Fields of `SamplingParams` that are flags; what is not given comes from the checkpoint."""
HIDDEN: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}


class Once(argparse.Action):
    """Stores a value. Another one for the same setting is refused: it is not for the order to decide which counts.

    A flag without a value stands for its `const`, or for true, and behind `--no-` for false.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name = given = option_string or self.dest.upper()
        if self.nargs == 0:
            values = not name.startswith("--no-") if self.const is None else self.const
        else:
            given = f"{name} {values}"
        earlier = getattr(namespace, self.dest, None)
        if earlier not in (None, values):
            parser.error(f"{given} contradicts {self.dest} = {earlier}, which the command line also says")
        setattr(namespace, self.dest, values)

    def format_usage(self) -> str:
        return " | ".join(self.option_strings)


class Passed(argparse.Action):
    """The `ForeignFlag` that is its `const` is refused, or kept in `passed` with what is to be told of it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag: ForeignFlag = self.const
        if flag.neutral is None:
            namespace.passed = [*namespace.passed, f"{option_string} {flag.answer}"]
        elif values not in flag.neutral:
            parser.error(f"{option_string} {flag.answer}")


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of leaving the process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_setting_flags(parser: argparse.ArgumentParser, cls: type[SchedulerConfig]) -> None:
    """The argument MODEL, and one flag per field of `cls`; what is not given stays out of the namespace.

    Values stay texts: `configs/sources.py` checks them as it checks those of the other sources.
    """
    text = "a Hugging Face folder, a GGUF file, or smollm2 for the bundled checkpoint (the default)"
    parser.add_argument("model", nargs="?", metavar="MODEL", action=Once, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--model", "-m", action=Once, **HIDDEN)
    text = f"a TOML file of settings, or a preset ({', '.join(preset_names())})"
    parser.add_argument("--config", metavar="NAME|FILE", action=Once, help=text)
    for field in msgspec.structs.fields(cls):
        if field.name != "model":
            flag = "--" + field.name.replace("_", "-")
            names = [flag, "--no-" + flag[2:]] if plain_type(field.type) is bool else [flag]
            parser.add_argument(*names, *SAME.get(field.name, ()), **_options(field))
    for flag, (name, value) in FIXED.items():
        if name in cls.__struct_fields__:
            parser.add_argument(flag, action=Once, nargs=0, dest=name, const=value, **HIDDEN)


def _options(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    """What argparse should know of a field's flag."""
    kind, default, text = plain_type(field.type), field.default, description(field)
    if default is not None:
        text += f" (default: {default if kind is not bool else 'on' if default else 'off'})"
    options = {"action": Once, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if kind is bool:
        return options | {"nargs": 0}
    if field.name == "served_model_name":
        return options | {"action": "extend", "nargs": "+", "metavar": "NAME"}
    if get_origin(kind) is tuple:
        return options | {"action": "append", "metavar": "TEXT"}
    if get_origin(kind) is Literal:
        words = OTHER_WORDS.get(field.name, {})
        return options | {"choices": get_args(kind), "type": lambda word: words.get(word, word)}
    return options | {"metavar": {int: "N", float: "X"}.get(kind, "TEXT")}


def description(field: msgspec.structs.FieldInfo) -> str:
    """The text of a field's `Meta`."""
    texts = [item.description for item in get_args(field.type)[1:] if isinstance(item, Meta) and item.description]
    return texts[0] if texts else ""


def add_foreign_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add the flags of other servers that `argv` holds. What is to be told of them comes into `passed`."""
    parser.set_defaults(passed=[])
    given = {argument.partition("=")[0] for argument in argv}
    for flag in FOREIGN:
        if not given.isdisjoint(flag.names):
            parser.add_argument(*flag.names, action=Passed, dest="passed", nargs=flag.nargs, const=flag, **HIDDEN)


def given_settings(arguments: argparse.Namespace, cls: type[SchedulerConfig]) -> Mapping[str, object]:
    """The settings that the command line holds.

    A model that stands behind the names of --served-model-name is the model, not one more name.
    """
    given = {name: value for name, value in vars(arguments).items() if name in cls.__struct_fields__}
    served = given.get("served_model_name", [])
    if "model" not in given and len(served) > 1 and os.path.exists(served[-1]):
        given |= {"served_model_name": served[:-1], "model": served[-1]}
    return given


def refuse_unknown(unknown: list[str], parser: argparse.ArgumentParser) -> None:
    """Raise `UsageError` for arguments that no flag took, with the nearest flag, or what is to be said of it."""
    if unknown:
        name = unknown[0].split("=")[0]  # the value may be a secret
        shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
        flags = [flag for action in shown for flag in action.option_strings if flag.startswith("--")]
        for foreign in FOREIGN:
            if name in foreign.names and not any(flag.startswith(name) for flag in flags):
                raise UsageError(f"{name} {foreign.answer}")
        own = [next((flag for flag in action.option_strings if flag in flags), "") for action in shown]  # no aliases
        raise UsageError(f"unknown argument {name}{did_you_mean(name, own) or did_you_mean(name, flags)}")
