"""Grammars in Lark's notation, which guidance and outlines write, in the EBNF of all others."""

import re
from typing import Any

_HEADER = re.compile(r"\A\s*%llguidance[ \t]*\{\s*\}")
_EBNF = re.compile(r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE)
_START = re.compile(r"^[^\S\n]*[?!]*start\b[^:\n]*:", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:([A-Za-z])|.)", re.DOTALL)
_ESCAPES = frozenset("abcdDfnrsStuUvwWx")


def is_lark(grammar: str) -> bool:
    return grammar.lstrip().startswith("%llguidance") or bool(_START.search(grammar) and not _EBNF.search(grammar))


def lark_to_ebnf(grammar: str, xgrammar: Any) -> str:
    """Raises ValueError for what xgrammar would read differently, and RuntimeError for what it does not know."""
    grammar = _HEADER.sub("", grammar)
    if "%json" in grammar:  # of whose schemas xgrammar passes over what it does not enforce
        raise ValueError("%json in a Lark grammar is not supported")
    for escape in _ESCAPE.finditer(grammar):
        if escape[1] and escape[1] not in _ESCAPES:
            raise ValueError(f"{escape[0]} in a Lark grammar is not supported")
    return str(xgrammar.Grammar.from_lark(grammar))
