"""xgrammar's structural tags, with their schemas and patterns in the form that it enforces."""

from collections.abc import Callable
from typing import Any

from .json_schema import MAX_DEPTH, enforceable
from .patterns import checked_pattern

MAY_LOOSEN = "may_loosen"
"""Key of a schema's node, Octavo's own: where the schema cannot be used, any value will do, or any object."""
_INNER = ("content", "begin", "end")
_LISTS = ("elements", "tags")


class TagReader:
    """Converts one structural tag. Raises ValueError for what cannot be enforced."""

    def __init__(
        self,
        pattern_for: Callable[[str], str],
        ebnf: Callable[[str], str],
        check_schema: Callable[[Any], object],
        max_spaces: int,
    ) -> None:
        """JSON has at most `max_spaces` consecutive white space where the tag says nothing else.

        `pattern_for` is as for `enforceable`; `ebnf` gives a grammar in EBNF, and `check_schema`
        raises for an enforceable schema that means nothing to xgrammar.
        """
        self._pattern_for = pattern_for
        self._ebnf = ebnf
        self._check_schema = check_schema
        self._max_spaces = max_spaces
        self.named_ids: set[int] = set()
        """Tokens that the tag names by their ids."""

    def read(self, tag: Any) -> dict[str, Any]:
        """The structural tag for xgrammar."""
        if not isinstance(tag, dict):
            raise ValueError("a structural tag is a JSON object")
        return {"type": "structural_tag", **tag, "format": self._format(tag.get("format"), 0)}

    def _format(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"the structural tag is nested more than {MAX_DEPTH} deep")
        if not isinstance(node, dict):
            return node
        converted = dict(node)
        kind = node.get("type")
        if "json_schema" in node:
            converted["json_schema"] = self._schema(node["json_schema"], may_loosen=converted.pop(MAY_LOOSEN, False))
            if kind == "json_schema" and node.get("max_whitespace_cnt") is None:
                converted["max_whitespace_cnt"] = self._max_spaces
        if kind == "regex" and isinstance(node.get("pattern"), str):
            converted["pattern"] = checked_pattern(node["pattern"])
        if kind == "grammar" and isinstance(node.get("grammar"), str):
            converted["grammar"] = self._ebnf(node["grammar"])
        self._note([node.get("token"), *_list(node.get("trigger_tokens"))])
        for key in _INNER:
            if key in node:
                converted[key] = self._format(node[key], depth + 1)
        for key in _LISTS:
            if isinstance(node.get(key), list):
                converted[key] = [self._format(each, depth + 1) for each in node[key]]
        if isinstance(node.get("rules"), list):
            converted["rules"] = [self._rule(each, depth + 1) for each in node["rules"]]
        return converted

    def _schema(self, schema: Any, *, may_loosen: bool) -> Any:
        try:
            enforced = enforceable(schema, self._pattern_for)
            if may_loosen:
                self._check_schema(enforced)
        except (ValueError, RuntimeError):
            if not may_loosen:
                raise
            is_object = isinstance(schema, dict) and schema.get("type") == "object"
            return {"type": "object", "additionalProperties": True} if is_object else {}
        return enforced

    def _rule(self, rule: Any, depth: int) -> Any:
        """Of `dispatch` and `token_dispatch`: [what begins it, format]"""
        if not isinstance(rule, list) or len(rule) != 2:
            return rule
        self._note(rule[:1])
        return [rule[0], self._format(rule[1], depth)]

    def _note(self, tokens: list[Any]) -> None:
        self.named_ids.update(each for each in tokens if isinstance(each, int))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
