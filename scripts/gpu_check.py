"""Are the GPU kernels right on this machine, and how fast is it all? Nothing to install beside torch and triton.

python scripts/gpu_check.py                      all sections, at most --budget seconds (330)
python scripts/gpu_check.py --only NAME[,NAME]   some of them
python scripts/gpu_check.py --dry                tiny shapes on a CPU, Triton's kernels by its interpreter

The last line is one JSON document, which is also written to $OUT/gpu_check.json (build/ without OUT). The exit
status is 1 when a check failed. What the figures mean: docs/gpu.md.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.gpu.plan import Plan  # noqa: E402
from scripts.gpu.wheels import provide  # noqa: E402


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=330.0, help="seconds for all sections together")
    parser.add_argument("--only", default="", help="sections to run, separated by commas")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--backend", default="", help="check this attention backend alone: a name, or module:Class")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork", help="how the sections' processes begin")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    plan = Plan(options.dry, options.backend, options.start)
    os.environ.update(plan.environment)  # before triton is imported
    with tempfile.TemporaryDirectory() as unpacked:
        provide("msgspec", ROOT / "wheels", Path(unpacked))
        from scripts.gpu.document import write
        from scripts.gpu.sections import run_all, select

        document = run_all(select(options.only, plan), plan, options.budget)
    return write(document, Path(os.environ.get("OUT") or ROOT / "build"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
