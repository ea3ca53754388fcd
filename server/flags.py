"""Command-line flags made from the settings' fields, so that names, types and texts have one source."""

import argparse
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec
from msgspec import Meta

from configs.errors import UsageError
from configs.settings import SchedulerConfig
from configs.sources import did_you_mean, plain_type, preset_names


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of leaving the process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    text = "a Hugging Face folder, a GGUF file, or smollm2 for the bundled checkpoint (the default)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text, default=argparse.SUPPRESS)


def add_setting_flags(parser: argparse.ArgumentParser, cls: type[SchedulerConfig]) -> None:
    """One flag per field of `cls` but `model`; what is not given stays out of the namespace.

    Values stay texts: `configs/sources.py` checks them as it checks those of the other sources.
    """
    presets = ", ".join(preset_names())
    parser.add_argument("--config", metavar="NAME|FILE", help=f"a TOML file of settings, or a preset ({presets})")
    for field in msgspec.structs.fields(cls):
        if field.name == "model":
            continue
        flag = "--" + field.name.replace("_", "-")
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field)}
        kind = plain_type(field.type)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is tuple:
            options |= {"action": "append", "metavar": "TEXT"}
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
        parser.add_argument(flag, **options)


def given_settings(arguments: argparse.Namespace, cls: type[SchedulerConfig]) -> Mapping[str, object]:
    """The settings that the command line holds."""
    names = {field.name for field in msgspec.structs.fields(cls)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def refuse_unknown(unknown: list[str], parser: argparse.ArgumentParser) -> None:
    """Raise `UsageError` for arguments that no flag took, with the nearest flag."""
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        name = unknown[0].split("=")[0]  # the value may be a secret
        raise UsageError(f"unknown argument {name}{did_you_mean(name, flags)}")


def _help(field: msgspec.structs.FieldInfo) -> str:
    default = "" if field.default is None else f" (default: {_shown(field.default)})"
    return (description(field) + default).replace("%", "%%")


def description(field: msgspec.structs.FieldInfo) -> str:
    """The text of a field's `Meta`."""
    texts = [item.description for item in get_args(field.type)[1:] if isinstance(item, Meta) and item.description]
    return texts[0] if texts else ""


def _shown(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value
