"""Tests that the documentation names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(?:([\w/]+\.py))?::(test_\w+)`")


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_every_test_that_is_named_exists(document: Path) -> None:
    """`file.py::test`, and `::test` for another one of the same file."""
    file = ""
    for named, test in NAMED.findall(document.read_text()):
        file = named or file
        assert re.search(rf"def {test}\b", (ROOT / "tests" / file).read_text()), f"{file}::{test}"
