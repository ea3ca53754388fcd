"""What flags mean together: defaults that hang on other flags, and combinations that make no sense."""

import argparse
import math
from collections.abc import Sequence

from configs.errors import UsageError

from .datasets import Sample, needs_chat, read_lines
from .names import CHAT, COMPLETIONS, FILE


def settle(arguments: argparse.Namespace) -> None:
    """Fills in `arguments`; `lines` are those of the file. Raises `UsageError`."""
    _settle_data(arguments)
    _settle_load(arguments)
    arguments.goodput = dict(arguments.goodput)


def _settle_data(arguments: argparse.Namespace) -> None:
    name = arguments.dataset_name = arguments.dataset_name or (FILE if arguments.dataset_path else "random")
    if (name == FILE) != (arguments.dataset_path is not None):
        raise UsageError(f"--dataset-name {FILE} and --dataset-path go together")
    if arguments.turns is not None and name != "multi_turn":
        raise UsageError("--turns is for --dataset-name multi_turn; lines of a file have turns of their own")
    arguments.turns = (arguments.turns or 4) if name == "multi_turn" else 1
    arguments.lines = read_lines(arguments.dataset_path, arguments.output_len) if name == FILE else []
    if arguments.ignore_eos is None:
        arguments.ignore_eos = name != FILE
    is_chat = name == "multi_turn" or needs_chat(arguments.lines)
    if is_chat and arguments.endpoint == COMPLETIONS:
        raise UsageError(f"chats need --endpoint {CHAT}")
    arguments.endpoint = arguments.endpoint or (CHAT if is_chat else COMPLETIONS)
    if arguments.endpoint == CHAT and _has_token_ids(arguments.lines):
        raise UsageError(f"prompts of token ids need --endpoint {COMPLETIONS}")


def _has_token_ids(samples: Sequence[Sample]) -> bool:
    return any(isinstance(ask.prompt, list) and isinstance(ask.prompt[0], int) for sample in samples for ask in sample)


def _settle_load(arguments: argparse.Namespace) -> None:
    if arguments.ramp_up_strategy is not None:
        if arguments.request_rate != [math.inf]:
            raise UsageError("--ramp-up-strategy sets the rate: it does not go with --request-rate")
        if arguments.ramp_up_start_rps is None or arguments.ramp_up_end_rps is None:
            raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if arguments.compare is not None and len(arguments.request_rate) > 1:
        raise UsageError("--compare takes one --request-rate")
    if arguments.repeats is None:
        arguments.repeats = 3 if arguments.compare is not None else 1
