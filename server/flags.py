"""Command-line flags made from the settings' fields, so that names, types and texts have one source."""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec
from msgspec import Meta

from configs.errors import UsageError
from configs.settings import SchedulerConfig
from configs.sources import OTHER_WORDS, did_you_mean, plain_type, preset_names
from server.foreign_flags import FIXED, FOREIGN, SAME, ForeignFlag

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
