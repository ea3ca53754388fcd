"""`octavo`: serve, generate, chat, bench. Each command lives in `server/commands` and is imported when it runs."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from configs.errors import UsageError, printable
from configs.settings import EngineConfig, ServerConfig
from configs.sources import resolve, unknown_variables
from server.commands.bench.flags import CLIENTS, add_benchmarks
from server.flags import (
    Parser,
    add_foreign_flags,
    add_model_argument,
    add_setting_flags,
    given_settings,
    refuse_unknown,
)
from server.version import version


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. A `UsageError` is one line on stderr and exit code 2; Ctrl-C gives 130."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except UsageError as error:
        print("octavo: error:", printable(" ".join(str(error).split())), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str]) -> int:
    argv = [_with_hyphens(argument) for argument in argv]
    parser, commands = build_parser(argv)
    arguments, unknown = parser.parse_known_args(argv)
    command = commands[_name(arguments)]
    refuse_unknown(unknown, command)
    config = _config(arguments)
    if config is not None and command is not commands["serve"]:  # which logs them
        for line in unknown_variables(os.environ):
            print("octavo: warning:", printable(line), file=sys.stderr)
    module = importlib.import_module(f"server.commands.{arguments.module}")
    code: int = module.run(config, arguments)
    return code


def _with_hyphens(argument: str) -> str:
    """--max_num_seqs=4, as vLLM takes it too, as --max-num-seqs=4."""
    flag, sign, value = argument.partition("=")
    return flag.replace("_", "-") + sign + value if flag.startswith("--") else argument


def _name(arguments: argparse.Namespace) -> str:
    """As `bench latency`."""
    return " ".join(filter(None, (arguments.command, getattr(arguments, "bench", None))))


def _config(arguments: argparse.Namespace) -> EngineConfig | None:
    """None for a command without a model."""
    if _name(arguments) in CLIENTS:
        return None
    cls = ServerConfig if arguments.command == "serve" else EngineConfig
    return resolve(cls, toml=arguments.config, environ=os.environ, flags=given_settings(arguments, cls))


def build_parser(argv: Sequence[str] = ()) -> tuple[Parser, dict[str, Parser]]:
    """The parser of `octavo`, and those of its commands by name, for this command line."""
    parser = Parser(prog="octavo", description="LLM inference server with an OpenAI-style API.")
    parser.add_argument("--version", action="version", version=f"octavo {version()}")
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = kinds.add_parser("serve", help="serve a model over HTTP")
    generate = kinds.add_parser("generate", help="continue prompts in the terminal")
    chat = kinds.add_parser("chat", help="chat with a model in the terminal")
    bench = kinds.add_parser("bench", help="measure")
    benchmarks = {f"bench {name}": parser for name, parser in add_benchmarks(bench).items()}
    commands = {"serve": serve, "generate": generate, "chat": chat, **benchmarks}
    for name, command in commands.items():
        command.set_defaults(module=name.split()[0])
    with_model = {name: command for name, command in commands.items() if name not in CLIENTS}
    for command in with_model.values():
        add_model_argument(command)
    add_foreign_flags(serve, argv)
    _add_sampling_flags(generate)
    _add_sampling_flags(chat)
    generate.add_argument("--prompt", action="append", required=True, help="text to continue; may be repeated")
    for name, command in with_model.items():
        add_setting_flags(command, ServerConfig if name == "serve" else EngineConfig)
    return parser, commands


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Flags named as the fields of `SamplingParams`; what is not given comes from the checkpoint."""
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of one answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="X", help="keep the likeliest tokens up to this probability")
    parser.add_argument("--min-p", type=float, metavar="X", help="keep tokens this likely, relative to the likeliest")
    parser.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 avoids repetition")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")


if __name__ == "__main__":
    sys.exit(main())
