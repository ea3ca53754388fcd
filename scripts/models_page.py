"""Writes docs/models.md from the records of families in engine/checkpoints/families.

Run `python scripts/models_page.py` after adding or changing one.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from engine.checkpoints.families import FAMILIES  # noqa: E402
from engine.checkpoints.family import Family  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Models

What is served, written by `python scripts/models_page.py` from the records in `engine/checkpoints/families`.

All of it is native: on a CPU one call of the C++ kernels for all layers, on a GPU Triton's kernels, and plain torch
where neither can run. A checkpoint is a Hugging Face folder with safetensors (float32, float16, bfloat16, or float8
with scales), or a GGUF file, of which any part may be named. `ForSequenceClassification`, `ForTokenClassification` and
bare `Model` of the same families are served for embeddings.

What a configuration says and Octavo does not honour is an error at start that names the key; a key that nobody knows is
named in the start-up message. Code that a checkpoint brings along is never run.

| models | Hugging Face | GGUF |
|---|---|---|
"""


def document() -> str:
    return HEAD + "".join(f"{row(family)}\n" for family in sorted(FAMILIES, key=lambda family: family.name))


def row(family: Family) -> str:
    gguf = ", ".join(f"`{name}`" for name in family.gguf) or "as another's" * (family.name in SHARED)
    architecture = OTHERWISE_NAMED.get(family.name, f"{family.name}ForCausalLM")
    return f"| {family.models} | `{architecture}` | {gguf} |"


SHARED = {"Mistral", "Ministral", "Olmo3"}
"""Families whose GGUF files have the name of another one."""

OTHERWISE_NAMED = {"GPT2": "GPT2LMHeadModel"}


if __name__ == "__main__":
    PAGE.write_text(document())
