"""Sampling parameters of the terminal commands."""

import argparse
from typing import Any

import msgspec

from configs.errors import InvalidRequest, UsageError
from configs.sampling import SamplingParams


def params_from_flags(arguments: argparse.Namespace, defaults: dict[str, Any]) -> SamplingParams:
    """Flags over the checkpoint's `defaults`; without --max-tokens an answer may fill the context."""
    flags = {
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "min_p": arguments.min_p,
        "repetition_penalty": arguments.repetition_penalty,
        "stop": tuple(arguments.stop or ()) or None,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    known = {field.name for field in msgspec.structs.fields(SamplingParams)}
    usable = {name: value for name, value in defaults.items() if name in known}
    try:
        return SamplingParams(**{"max_tokens": None, **usable, **given})
    except InvalidRequest as error:
        raise UsageError(error.message) from error
