"""Writes docs/files.md: every module of Octavo with the first sentence of its docstring.

Run `python scripts/file_tree.py` after adding, moving or removing a module.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "files.md"
FOLDERS = ("configs", "scheduler", "engine", "server")
HEAD = """# Files

Every module, with the first sentence of what it says of itself. Written by `python scripts/file_tree.py`.
"""


def document() -> str:
    lines = [HEAD, f"- `octavo.py` – {summary(ROOT / 'octavo.py')}"]
    for folder in FOLDERS:
        lines += ["", f"## {folder}/", ""]
        lines += entries(ROOT / folder, depth=0)
    return "\n".join(lines) + "\n"


def entries(folder: Path, depth: int) -> Iterator[str]:
    indent = "  " * depth
    paths = sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name))
    for path in paths:
        if path.is_dir() and any(path.rglob("*.py")):
            said = summary(path / "__init__.py")
            yield f"{indent}- `{path.name}/`" + (f" – {said}" if said else "")
            yield from entries(path, depth + 1)
        elif path.suffix in (".py", ".cpp", ".h") and path.name != "__init__.py":
            yield f"{indent}- `{path.name}` – {summary(path)}"


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, or of a C++ file's first comment."""
    if not path.exists():
        return ""
    text = path.read_text()
    said = ast.get_docstring(ast.parse(text)) if path.suffix == ".py" else first_comment(text)
    sentence = re.split(r"(?<=\.)\s|\n\n", said or "", maxsplit=1)[0]
    return " ".join(sentence.split()).rstrip(".")


def first_comment(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    comment = re.match(r"\s*((?://[^\n]*\n)+)", "\n".join(lines) + "\n")
    return "\n".join(line.strip().removeprefix("//").strip() for line in comment[1].splitlines()) if comment else ""


if __name__ == "__main__":
    PAGE.write_text(document())
