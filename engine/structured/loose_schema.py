"""Schemas without what cannot be enforced: functions that are not strict follow theirs as far as it goes."""

from typing import Any

from .costs import check_costs
from .json_schema import MAX_DEPTH, REFUSED, TYPED, enforceable, modern, with_subschemas
from .patterns import string_pattern

_TYPE_NAMES = {"str": "string", "dict": "object", "list": "array", "int": "integer", "float": "number"}
"""What schemas made from Python's signatures say."""
_LIMITS = ("multipleOf", "minLength", "maxLength", "minProperties", "maxProperties", "propertyNames")
_FORMS = ("anyOf", "oneOf", "allOf")


def loosened(schema: Any, passed_over: list[str], name: str) -> dict[str, Any]:
    """The object's schema without keywords that `enforceable` refuses, which are added to `passed_over` as `name`'s."""
    try:
        check_costs(schema)
    except ValueError:
        passed_over.append(f"{name}: parameters")
        return {"type": "object"}
    loose = _Loosening(schema)
    result = loose.of(schema, "", 0)
    passed_over += [f"{name}: {where}" for where in loose.dropped]
    return result if isinstance(result, dict) else {}


class _Loosening:
    def __init__(self, root: Any) -> None:
        self._root = root
        self.dropped: list[str] = []
        """Paths of keywords."""

    def of(self, schema: Any, where: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            self.dropped.append(where or "schema")
            return {}
        schema = self._mended(modern(schema), where)
        before = len(self.dropped)
        inner = with_subschemas(schema, lambda each, name: self.of(each, _path(where, name), depth + 1))
        kept = self._kept(inner)
        for keyword in (each for each in schema if each not in kept):
            path = _path(where, keyword)
            told = [each for each in self.dropped[before:] if not f"{each}.".startswith(f"{path}.")]
            self.dropped[before:] = [*told, path]
        return kept

    def _mended(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        """Names that are common mistakes, and references that lead nowhere."""
        mended = dict(schema)
        kind, required, named = schema.get("type"), schema.get("required"), schema.get("properties")
        if isinstance(kind, str) and kind in _TYPE_NAMES:
            mended["type"] = _TYPE_NAMES[kind]
            self.dropped.append(_path(where, "type"))
        if isinstance(required, list) and isinstance(named, dict):
            mended["required"] = [each for each in required if isinstance(each, str) and each in named]
            if len(mended["required"]) < len(required):
                self.dropped.append(_path(where, "required"))
        if "$ref" in schema and not self._leads_somewhere(schema["$ref"]):
            del mended["$ref"]
            self.dropped.append(_path(where, "$ref"))
        return mended

    def _leads_somewhere(self, reference: Any) -> bool:
        node, (start, *steps) = self._root, reference.split("/") if isinstance(reference, str) else [""]
        for step in steps:
            node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        return start == "#" and isinstance(node, dict | bool)

    def _kept(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The most of its keywords that can be enforced together; nothing is said of its parts."""
        if _holds(schema):
            return schema
        described = "properties" in schema or "items" in schema
        forms = ("type",) if "enum" in schema or "const" in schema else _FORMS if described else ("type", *TYPED)
        order = dict.fromkeys((*REFUSED, *_LIMITS, *forms, *TYPED, *_FORMS, "type", "enum", "const", "$ref"))
        kept, removed = dict(schema), []
        for keyword in (each for each in order if each in schema):
            removed.append(keyword)
            del kept[keyword]
            if _holds(kept):
                break
        for keyword in removed:
            if _holds(more := {**kept, keyword: schema[keyword]}):
                kept = more
        return kept


def _holds(schema: dict[str, Any]) -> bool:
    try:
        enforceable(with_subschemas(schema, lambda *_: True), string_pattern)
    except ValueError:
        return False
    return True


def _path(where: str, keyword: str) -> str:
    return f"{where}.{keyword}" if where else keyword
