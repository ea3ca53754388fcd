"""The README tells the truth about what can be derived."""

import re
from pathlib import Path

import msgspec

from configs.settings import ServerConfig
from scripts.file_tree import PAGE, document

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def settings_table() -> str:
    rows = ["| flag | default | what |", "|---|---|---|"]
    for field in msgspec.structs.fields(ServerConfig):
        if field.name == "model":
            continue
        default = "" if field.default is None else f"`{field.default}`"
        rows.append(f"| `--{field.name.replace('_', '-')}` | {default} | {_description(field.type)} |")
    return "\n".join(rows)


def _description(annotation: object) -> str:
    return next(meta.description for meta in annotation.__metadata__ if meta.description)


def test_settings_table_equals_the_settings():
    found = re.search(r"<!-- settings: .*? -->\n(.*?)\n<!-- /settings -->", README, re.DOTALL)
    assert found
    assert found[1] == settings_table()


def test_the_list_of_files_is_up_to_date():
    """Mend it with `python scripts/file_tree.py`."""
    assert PAGE.read_text() == document()
