"""`python -m tests.chaos`: requests of all kinds, answered right or not at all, whatever happens to the engine.

CHAOS_SECONDS    how long (600)
CHAOS_SEED       the same requests and deeds again (default: another one each time)
CHAOS_CLIENTS    at once (16)
CHAOS_MODEL      as `octavo serve` takes it (default: a tiny one with random weights)
CHAOS_FLAGS      more of the server's, say "--async-scheduling"
"""

import os
import random
import sys
import tempfile
from pathlib import Path

from .plan import Plan
from .run import Run


def main() -> int:
    environment = os.environ
    plan = Plan(
        seconds=float(environment.get("CHAOS_SECONDS", "600")),
        seed=int(environment.get("CHAOS_SEED") or random.SystemRandom().randrange(10**6)),
        num_clients=int(environment.get("CHAOS_CLIENTS", "16")),
        model=environment.get("CHAOS_MODEL") or None,
        flags=tuple(environment.get("CHAOS_FLAGS", "").split()),
    )
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"chaos: seed {plan.seed}, {plan.seconds:.0f} s, logs in {folder}", flush=True)
    report = Run(plan, folder).run()
    print(report)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
