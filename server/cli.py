"""`octavo`: serve, generate, chat, bench. Each command lives in `server/commands` and is imported when it runs."""

import importlib
import os
import sys
from collections.abc import Sequence

from configs.errors import UsageError, printable
from configs.settings import EngineConfig, ServerConfig
from configs.sources import resolve, unknown_variables
from server import version
from server.commands.bench.flags import CLIENTS, add_benchmarks
from server.flags import SAMPLING, Parser, add_foreign_flags, add_setting_flags, given_settings, refuse_unknown


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
    name = " ".join(filter(None, (arguments.command, getattr(arguments, "bench", None))))
    refuse_unknown(unknown, commands[name])
    config = None
    if name not in CLIENTS:
        cls = ServerConfig if name == "serve" else EngineConfig
        config = resolve(cls, toml=arguments.config, environ=os.environ, flags=given_settings(arguments, cls))
        for line in [] if name == "serve" else unknown_variables(os.environ):  # serve logs them
            print("octavo: warning:", printable(line), file=sys.stderr)
    module = "terminal" if name in ("generate", "chat") else arguments.command
    code: int = importlib.import_module(f"server.commands.{module}").run(config, arguments)
    return code


def _with_hyphens(argument: str) -> str:
    """--max_num_seqs=4, as vLLM takes it too, as --max-num-seqs=4."""
    flag, sign, value = argument.partition("=")
    return flag.replace("_", "-") + sign + value if flag.startswith("--") else argument


def build_parser(argv: Sequence[str] = ()) -> tuple[Parser, dict[str, Parser]]:
    """The parser of `octavo` for this command line, and those of its commands by name, such as `bench latency`."""
    parser = Parser(prog="octavo", description="LLM inference server with an OpenAI-style API.")
    parser.add_argument("--version", action="version", version=f"octavo {version()}")
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = kinds.add_parser("serve", help="serve a model over HTTP")
    generate = kinds.add_parser("generate", help="continue prompts in the terminal")
    chat = kinds.add_parser("chat", help="chat with a model in the terminal")
    benchmarks = add_benchmarks(kinds.add_parser("bench", help="measure"))
    commands = {"serve": serve, "generate": generate, "chat": chat}
    commands |= {f"bench {name}": benchmark for name, benchmark in benchmarks.items()}
    add_foreign_flags(serve, argv)
    for name, options in SAMPLING.items():
        generate.add_argument("--" + name.replace("_", "-"), **options)
        chat.add_argument("--" + name.replace("_", "-"), **options)
    generate.add_argument("--prompt", action="append", required=True, help="text to continue; may be repeated")
    for name, command in commands.items():
        if name not in CLIENTS:
            add_setting_flags(command, ServerConfig if name == "serve" else EngineConfig)
    return parser, commands


if __name__ == "__main__":
    sys.exit(main())
