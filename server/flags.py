"""Command-line flags made from the settings' fields, so that names, types and texts have one source."""

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec
from msgspec import Meta

from configs.errors import UsageError
from configs.settings import SchedulerConfig
from configs.sources import OTHER_WORDS, did_you_mean, plain_type, preset_names
from server.foreign_flags import FIXED, FOREIGN, SAME, Foreign


class Once(argparse.Action):
    """Stores a value. Another one for the same setting is refused: it is not for the order to decide which counts."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        values = self.const if self.nargs == 0 else values
        earlier = getattr(namespace, self.dest, None)
        if earlier not in (None, values):
            name = option_string or self.dest.upper()
            parser.error(f"{name} {values} contradicts {earlier}, which the command line also says")
        setattr(namespace, self.dest, values)


class Switch(argparse.BooleanOptionalAction):
    """As `Once`, for --page and --no-page."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, None)
        super().__call__(parser, namespace, values, option_string)
        if earlier not in (None, getattr(namespace, self.dest)):
            parser.error(f"{option_string} contradicts what the command line says before it")


class Passed(argparse.Action):
    """A flag of another server: refused, or kept in `passed` with what is to be told of it."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, row: Foreign, **options: Any) -> None:
        super().__init__(option_strings, "passed", **options)
        self.row = row

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self.row.passing is None:
            namespace.passed = [*namespace.passed, f"{option_string} {self.row.answer}"]
        elif values not in self.row.passing:
            parser.error(f"{option_string} {self.row.answer}")


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of leaving the process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    text = "a Hugging Face folder, a GGUF file, or smollm2 for the bundled checkpoint (the default)"
    options: dict[str, Any] = {"metavar": "MODEL", "action": Once, "default": argparse.SUPPRESS}
    parser.add_argument("model", nargs="?", help=text, **options)
    parser.add_argument("--model", "-m", help=argparse.SUPPRESS, **options)


def add_setting_flags(parser: argparse.ArgumentParser, cls: type[SchedulerConfig]) -> None:
    """One flag per field of `cls` but `model`; what is not given stays out of the namespace.

    Values stay texts: `configs/sources.py` checks them as it checks those of the other sources.
    """
    presets = ", ".join(preset_names())
    text = f"a TOML file of settings, or a preset ({presets})"
    parser.add_argument("--config", metavar="NAME|FILE", action=Once, help=text)
    for field in msgspec.structs.fields(cls):
        if field.name == "model":
            continue
        flag = "--" + field.name.replace("_", "-")
        options: dict[str, Any] = {"action": Once, "default": argparse.SUPPRESS, "help": _help(field)}
        kind = plain_type(field.type)
        if kind is bool:
            options["action"] = Switch
        elif field.name == "served_model_name":
            options |= {"action": "extend", "nargs": "+", "metavar": "NAME"}
        elif get_origin(kind) is tuple:
            options |= {"action": "append", "metavar": "TEXT"}
        elif get_origin(kind) is Literal:
            other_words = OTHER_WORDS.get(field.name, {})
            options |= {"choices": get_args(kind), "type": partial(_in_our_words, other_words)}
        else:
            options["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
        parser.add_argument(flag, *SAME.get(field.name, ()), **options)
    for flag, (name, value) in FIXED.items():
        if name in cls.__struct_fields__:
            options = {"dest": name, "const": value, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(flag, action=Once, nargs=0, **options)


def add_foreign_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add the flags of other servers that `argv` holds. What is to be told of them comes into `passed`."""
    parser.set_defaults(passed=[])
    given = {argument.partition("=")[0] for argument in argv}
    for row in FOREIGN:
        names = [word for word in row.flags.split() if word.startswith("-")]
        if given.isdisjoint(names):
            continue
        metavar = row.flags.rpartition(" ")[2]
        nargs = 0 if metavar in names else "?" if metavar.startswith("[") else None
        parser.add_argument(
            *names, action=Passed, row=row, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def given_settings(arguments: argparse.Namespace, cls: type[SchedulerConfig]) -> Mapping[str, object]:
    """The settings that the command line holds.

    A model that stands behind the names of --served-model-name is the model, not one more name.
    """
    fields = {field.name for field in msgspec.structs.fields(cls)}
    given = {name: value for name, value in vars(arguments).items() if name in fields}
    served = given.get("served_model_name", [])
    if "model" not in given and len(served) > 1 and os.path.exists(served[-1]):
        given |= {"served_model_name": served[:-1], "model": served[-1]}
    return given


def refuse_unknown(unknown: list[str], parser: argparse.ArgumentParser) -> None:
    """Raise `UsageError` for arguments that no flag took, with the nearest flag, or what is to be said of it."""
    if unknown:
        ours = (action for action in parser._actions if action.help is not argparse.SUPPRESS)
        flags = {flag for action in ours for flag in action.option_strings if flag.startswith("--")}
        flags -= {alias for aliases in SAME.values() for alias in aliases}
        name = unknown[0].split("=")[0]  # the value may be a secret
        for row in FOREIGN:
            if name in row.flags.split() and not any(flag.startswith(name) for flag in flags):
                raise UsageError(f"{name} {row.answer}")
        raise UsageError(f"unknown argument {name}{did_you_mean(name, flags)}")


def _in_our_words(other_words: Mapping[str, str], value: str) -> str:
    return other_words.get(value, value)


def _help(field: msgspec.structs.FieldInfo) -> str:
    default = "" if field.default is None else f" (default: {_shown(field.default)})"
    return (description(field) + default).replace("%", "%%")


def description(field: msgspec.structs.FieldInfo) -> str:
    """The text of a field's `Meta`."""
    texts = [item.description for item in get_args(field.type)[1:] if isinstance(item, Meta) and item.description]
    return texts[0] if texts else ""


def _shown(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value
