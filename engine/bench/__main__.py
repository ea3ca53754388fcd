"""`python -m engine.bench WHAT`: one measurement, in a process that `octavo bench` starts.

Standard input: one JSON object of `config`, the settings, and `options`, the measurement's keywords. The last line
of standard output: the figures; or, with exit status 2, an `error` that the person who starts can mend.
"""

import importlib
import json
import sys

import msgspec

from configs.errors import UsageError
from configs.settings import EngineConfig


def main() -> int:
    [what] = sys.argv[1:]
    request = json.load(sys.stdin)
    config = msgspec.convert(request["config"], EngineConfig)
    try:
        figures = importlib.import_module(f"engine.bench.{what}").measure(config, **request["options"])
    except UsageError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    except KeyboardInterrupt:
        return 130
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
