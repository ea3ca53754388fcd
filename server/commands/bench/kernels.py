"""`octavo bench kernels MODEL`: each C++ kernel, on the model's own weights, against what the machine can do."""

import argparse

from configs.settings import EngineConfig

from .engine_process import measure
from .report import print_report, print_table

COLUMNS = ("kernel", "rows", "ms", "GB/s", "GFLOP/s", "limit", "% of limit", "% of step")


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    options = {name: getattr(arguments, name) for name in ("rows", "context", "repeats")}
    report = measure("kernels", config, options)
    for name, value in report["ceilings"].items():
        print(f"{name.replace('_', ' '):28}{value:>10,.1f}")
    for step in report["steps"]:
        print(f"\n{step['what']}: {step['ms']:.2f} ms, of which {step['other_ms']:.2f} ms outside the kernels")
        rows = [
            [
                "–" if value is None else f"{value:,.1f}" if isinstance(value, float) else value
                for value in kernel.values()
            ]
            for kernel in step["kernels"]
        ]
        print_table(COLUMNS, rows)
    print_report("kernels", config, report)
    return 0
