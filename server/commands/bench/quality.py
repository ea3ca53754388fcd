"""`octavo bench quality MODEL`: what the weights' and activations' type costs, against float32, on a text."""

import argparse
from pathlib import Path

from configs.errors import UsageError
from configs.settings import EngineConfig

from .engine_process import measure
from .report import print_report

TEXT = Path(__file__).with_name("quality.txt")
LINES = {
    "positions": "{:,}",
    "kl_divergence": "{:.5f}",
    "kl_divergence_p99": "{:.5f}",
    "same_likeliest": "{:.2%}",
    "perplexity_float32": "{:.4f}",
    "perplexity": "{:.4f}",
}


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    path = Path(arguments.text or TEXT)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path}: {error}") from error
    report = measure("quality", config, {"text": text, "window": arguments.window})
    for name, form in LINES.items():
        print(f"{name.replace('_', ' '):22}{form.format(report[name]):>12}")
    print_report("quality", config, {"text": path.name, **report})
    return 0
