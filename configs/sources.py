"""Where settings come from: defaults < TOML file < environment < command line. The later source wins."""

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from configs.errors import SettingsError
from configs.settings import SECRETS, SchedulerConfig, ServerConfig

ENV_PREFIX = "OCTAVO_"
PRESETS = Path(__file__).parent / "presets"
KNOWN_KEYS = {field.name: field.type for field in msgspec.structs.fields(ServerConfig)}

OTHER_WORDS: Mapping[str, Mapping[str, str]] = {
    "dtype": {
        **dict.fromkeys(("float", "fp32", "f32"), "float32"),
        **dict.fromkeys(("half", "fp16", "f16"), "float16"),
        "bf16": "bfloat16",
    },
    "generation_config": {"vllm": "none"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "max_model_len": {"0": "auto", "-1": "auto"},
    "num_threads": {"0": "auto", "-1": "auto"},
    "reasoning_parser": dict.fromkeys(("deepseek", "deepseek_r1", "qwen3"), "think"),
}
"""What other servers call the values of a setting. Where a setting may be left out, `auto` leaves it out."""
_VARIABLES = {ENV_PREFIX + name.upper(): name for name in KNOWN_KEYS}
_OF_SERVICE = re.compile(
    r"[A-Z0-9_]+_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
"""How Kubernetes writes addresses: OCTAVO_PORT=tcp://10.0.0.1:8000 for a service that is called octavo."""
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

Config = TypeVar("Config", bound=SchedulerConfig)


def resolve(
    cls: type[Config],
    *,
    toml: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """Build `cls` from its defaults, a preset or TOML file, `environ` and `flags` (field name -> value).

    A file and the environment may hold keys of any layer: those that `cls` does not have are checked and left
    out, so that one file serves every command. Raises `SettingsError` naming the source and the key; variables that are
    no settings are left to `unknown_variables`.
    """
    found = _read_toml(toml) if toml is not None else {}
    found |= _read_environment(environ or {})
    found |= {name: _convert(name, value, _flag(name)) for name, value in (flags or {}).items()}
    own = {field.name for field in msgspec.structs.fields(cls)}
    return cls(**{name: value for name, value in found.items() if name in own})


def plain_type(annotation: Any) -> Any:
    """`Annotated[int, …] | None` -> int."""
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (types.UnionType, typing.Union):
        return plain_type(next(kind for kind in get_args(annotation) if kind is not types.NoneType))
    return annotation


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean …?` with the nearest of `known`, behind `prefix`, or nothing when none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""


def _read_toml(source: str | Path) -> dict[str, Any]:
    path = PRESETS / f"{source}.toml" if source in preset_names() else Path(source)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        presets = ", ".join(preset_names())
        raise SettingsError(f"--config {source}: {error.strerror}; the presets are {presets}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file: {error}") from error
    for name in content:
        if name not in KNOWN_KEYS:
            raise SettingsError(f"{path}: unknown key {name}{did_you_mean(name, KNOWN_KEYS)}")
    return {name: _convert(name, value, f"{path}: {name}", strict=True) for name, value in content.items()}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A line on each variable that looks like a setting and is none, with the nearest that is. Kubernetes sets
    variables of such names for each service, which are not meant for us."""
    known = [name.upper() for name in KNOWN_KEYS]
    return [
        f"unknown environment variable {name}{did_you_mean(name.removeprefix(ENV_PREFIX), known, ENV_PREFIX)}"
        for name in environ
        if name.startswith(ENV_PREFIX) and name not in _VARIABLES and not _OF_SERVICE.fullmatch(name)
    ]


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        _VARIABLES[variable]: _convert(_VARIABLES[variable], value, variable)
        for variable, value in environ.items()
        if variable in _VARIABLES and not (_OF_SERVICE.fullmatch(variable) and _SERVICE_ADDRESS.match(value))
    }


def _flag(name: str) -> str:
    if name not in KNOWN_KEYS:
        raise SettingsError(f"unknown setting {name}{did_you_mean(name, KNOWN_KEYS)}")
    return "--" + name.replace("_", "-")


def _convert(name: str, value: object, where: str, *, strict: bool = False) -> object:
    """Check one value against its field; `strict` takes no strings for numbers, but for counts such as 4k."""
    got = "" if name in SECRETS else f"; got {value!r}"
    kind = plain_type(KNOWN_KEYS[name])
    if get_origin(kind) is tuple:
        texts = value if isinstance(value, list) else [value]
        value = texts if strict else [item for text in texts for item in _items(str(text), where, got)]
    elif isinstance(value, str):
        value = OTHER_WORDS.get(name, {}).get(value, value)
        if kind in (int, float) and value == "auto" and getattr(ServerConfig(), name) is None:
            value = None
        elif kind is int and (count := _COUNT.fullmatch(value)):
            size = round(float(count[1]) * _UNITS[count[2]], 3)
            value = int(size) if size.is_integer() else value
    try:
        return msgspec.convert(value, KNOWN_KEYS[name], strict=strict)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {str(error).replace('`', '')}{got}") from (None if name in SECRETS else error)


def _items(text: str, where: str, got: str) -> list[Any]:
    """A JSON array, or texts with commas between."""
    if not text.startswith("["):
        return [item.strip() for item in text.split(",")]
    try:
        return msgspec.json.decode(text, type=list[Any])
    except msgspec.DecodeError as error:
        raise SettingsError(f"{where}: not a JSON array: {error}{got}") from None
