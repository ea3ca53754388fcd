"""Regular expressions as xgrammar reads them: ECMAScript's, over the whole text, \\d and \\w in ASCII.

What it would take for something else is refused, and a dot is kept from matching a line's end.
"""

_ESCAPES = frozenset("dDwWsSnrtfv0xucb")
"""Letters behind a backslash that mean what they mean in ECMAScript; xgrammar takes others for themselves."""


def checked_pattern(pattern: str) -> str:
    """The pattern for xgrammar. Raises ValueError for what it would read differently."""
    return "".join(_Scanner(pattern).parts())


def in_ascii(pattern: str) -> str:
    """The same pattern, with other characters as escapes."""
    return "".join(char if char.isascii() else f"\\u{{{ord(char):X}}}" for char in pattern)


class _Scanner:
    """Walks over a pattern's elements.

    An anchor is superfluous where nothing can stand before a ^ or behind a $, and never matches elsewhere. So each
    group keeps whether something may stand before its alternatives, and whether one of them has ended with a $.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._index = 0
        self._at_start = True
        self._ended = False
        self._groups: list[tuple[bool, bool]] = []  # of each open one: _at_start before it, _ended of its alternatives
        self._alternatives_ended = False

    def parts(self) -> list[str]:
        parts = []
        while self._index < len(self._pattern):
            part = self._element()
            self._index += len(part)
            parts.append("[^\\n\\r]" if part == "." else part)
        return parts

    def _element(self) -> str:
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
        elif first not in "*+?{":
            self._consume()
            if first == "\\":
                return self._escape()
            if first == "[":
                return self._set()
        return first

    def _consume(self) -> None:
        if self._ended:
            raise ValueError(f"pattern: nothing can match at position {self._index}, behind a $")
        self._at_start = False

    def _open(self) -> str:
        if self._ended:
            self._consume()
        self._groups.append((self._at_start, self._alternatives_ended))
        self._alternatives_ended = False
        rest = self._pattern[self._index :]
        if rest.startswith("(?<") and not rest.startswith(("(?<=", "(?<!")):
            return rest[: rest.find(">") + 1] or rest
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
        if len(text) == 2 and text[1].isalpha() and (text[1] not in _ESCAPES or text[1] == "b"):
            raise ValueError(f"pattern: {text} is not supported")
        return text

    def _set(self) -> str:
        end = self._index + 1
        while end < len(self._pattern) and self._pattern[end] != "]":
            if self._pattern[end] == "\\":
                letter = self._pattern[end + 1 : end + 2]
                if letter.isalpha() and letter not in _ESCAPES:
                    raise ValueError(f"pattern: \\{letter} is not supported")
                end += 1
            end += 1
        return self._pattern[self._index : end + 1]
