"""Regular expressions as xgrammar reads them: ECMAScript's, over the whole text, \\d and \\w in ASCII.

What it would take for something else is refused, and a dot is kept from matching a line's end.
"""

import re

_ESCAPES = frozenset("dDwWsSnrtfv0xuc")
"""Letters behind a backslash that mean what they mean in ECMAScript; xgrammar takes others for themselves."""
_COUNT = re.compile(r"\{\d+(,\d*)?\}")
_QUANTIFIER = re.compile(rf"(?P<count>[*+?]|{_COUNT.pattern})(?P<mode>[?+]?)")
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]+)\})")
_WRITTEN_ESCAPED = frozenset('"\\nrtfv0c')
"""What behind a backslash means a character that JSON writes with one."""


def checked_pattern(pattern: str) -> str:
    """The pattern for xgrammar. Raises ValueError for what it would read differently."""
    return "".join(_Scanner(pattern).parts())


def string_pattern(pattern: str) -> str:
    """The pattern for the strings of a JSON schema: of characters that JSON writes without a backslash.

    xgrammar 0.2.9's automaton lets texts through where `?` follows a group that ends in a repetition, and where ends
    of alternatives share their beginnings; neither happens with `{0,1}` and an empty group behind the whole.
    Raises ValueError as `checked_pattern` does, and where no such character fits: that would be a dead end.
    """
    text = "".join(_Scanner(pattern, in_string=True).parts())
    return f"(?:{_in_ascii(text)})(?:)"


def _in_ascii(pattern: str) -> str:
    return "".join(char if char.isascii() else f"\\u{{{ord(char):X}}}" for char in pattern)


class _Scanner:
    """Walks over a pattern's elements.

    An anchor is superfluous where nothing can stand before a ^ or behind a $, and never matches elsewhere. So each
    group keeps whether something may stand before its alternatives, and whether one of them has ended with a $.
    """

    def __init__(self, pattern: str, *, in_string: bool = False) -> None:
        self._pattern = pattern
        self._in_string = in_string
        self._index = 0
        self._at_start = True
        self._ended = False
        self._groups: list[tuple[bool, bool]] = []  # of each open one: _at_start before it, _ended of its alternatives
        self._alternatives_ended = False

    def parts(self) -> list[str]:
        parts = []
        while self._index < len(self._pattern):
            start = self._index
            part = self._element()
            self._index += len(part)
            parts.append(self._written(part, start))
        if self._groups:
            raise ValueError("pattern: a parenthesis is not closed")
        return parts

    def _written(self, part: str, start: int) -> str:
        if part in ("^", "$"):
            return ""
        if part == ".":
            return "[^\\n\\r]"
        if quantifier := _QUANTIFIER.fullmatch(part):
            if start == 0 or quantifier["mode"] == "+":
                raise ValueError(f"pattern: {part} at position {start} is not supported")
            return "{0,1}" if self._in_string and quantifier["count"] == "?" else quantifier["count"]
        if part.startswith("(?<"):
            return "("
        return part

    def _element(self) -> str:
        if quantifier := _QUANTIFIER.match(self._pattern, self._index):
            return quantifier[0]
        first = self._pattern[self._index]
        if first == "^":
            if not self._at_start:
                raise ValueError(f"pattern: ^ at position {self._index} can never match")
        elif first == "$":
            self._ended = True
        elif first == "|":
            self._next_alternative()
        elif first == ")":
            self._close()
        elif first == "(":
            return self._open()
        else:
            self._consume()
            if first == "\\":
                return self._escape()
            if first == "[":
                return self._set()
            self._check_writable(first == '"')
        return first

    def _consume(self) -> None:
        if self._ended:
            raise ValueError(f"pattern: nothing can match at position {self._index}, behind a $")
        self._at_start = False

    def _check_writable(self, is_escaped_in_json: bool) -> None:
        if self._in_string and is_escaped_in_json:
            raise ValueError(f"pattern: JSON writes what it wants at position {self._index} with a backslash")

    def _open(self) -> str:
        if self._ended:
            self._consume()
        self._groups.append((self._at_start, self._alternatives_ended))
        self._alternatives_ended = False
        rest = self._pattern[self._index :]
        if rest.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            raise ValueError(f"pattern: Lookaheads and lookbehinds ({rest[:4]}) are not supported")
        if rest.startswith("(?<"):
            return rest[: rest.find(">") + 1] or rest
        if rest.startswith("(?") and not rest.startswith("(?:"):
            raise ValueError(f"pattern: {rest[:3]} at position {self._index} is not supported")
        return "(?:" if rest.startswith("(?:") else "("

    def _next_alternative(self) -> None:
        self._alternatives_ended |= self._ended
        self._ended = False
        self._at_start = self._groups[-1][0] if self._groups else True

    def _close(self) -> None:
        if not self._groups:
            raise ValueError(f"pattern: ) at position {self._index} closes nothing")
        self._ended |= self._alternatives_ended
        _, self._alternatives_ended = self._groups.pop()
        self._at_start = False

    def _escape(self) -> str:
        text = self._pattern[self._index : self._index + 2]
        if len(text) == 2 and text[1].isalpha() and text[1] not in _ESCAPES:
            raise ValueError(f"pattern: {text} is not supported")
        self._check_writable(_is_escaped_in_json(self._pattern, self._index))
        code = _CODE.match(self._pattern, self._index)
        return code[0] if code else text

    def _set(self) -> str:
        end = self._index + 1
        negated = self._pattern[end : end + 1] == "^"
        writable = negated
        while end < len(self._pattern) and self._pattern[end] != "]":
            if self._pattern[end] == "\\":
                letter = self._pattern[end + 1 : end + 2]
                if letter.isalpha() and letter not in _ESCAPES | {"b"}:
                    raise ValueError(f"pattern: \\{letter} is not supported")
                writable |= not _is_escaped_in_json(self._pattern, end)
                end += 1
            else:
                writable |= self._pattern[end] != '"'
            end += 1
        self._check_writable(not writable)
        return self._pattern[self._index : end + 1]


def _is_escaped_in_json(pattern: str, index: int) -> bool:
    """Whether the escape at `index` means a character that JSON escapes."""
    if code := _CODE.match(pattern, index):
        char = chr(min(int(code[1] or code[2] or code[3], 16), 0x10FFFF))
        return char < " " or char in '"\\'
    return pattern[index + 1 : index + 2] in _WRITTEN_ESCAPED
