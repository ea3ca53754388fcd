"""Which JSON schemas xgrammar enforces, and the form in which it gets them.

xgrammar 0.2.9 passes over what it does not know. Whatever would let documents through that do not validate is refused
here; what no document can violate (`title`, `default`, unknown keywords, …) goes by. Kept but not enforced, because
much that is sent has it and most documents obey:

 - `format` other than date, time, date-time, duration, email, hostname, ipv4, ipv6, uri, uri-reference, uri-template,
   uuid, json-pointer and relative-json-pointer; of these the form (a date may be the 30th of February)
 - `oneOf` counts as `anyOf` where two cases cannot be told apart
 - where additional properties are allowed, one of them may repeat a name that came before
 - `pattern` holds for the whole text

An object is closed unless `additionalProperties` opens it, and its properties come in the schema's order. An object or
an array of whose contents the schema says nothing holds anything.
"""

import json
import math
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
"""Nested schemas; xgrammar's time grows with the cube."""

_FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""xgrammar reads the first of these, and nothing beside it."""

_KEYWORDS = {
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
}
_KEYWORDS["integer"] = _KEYWORDS["number"]
TYPED = tuple(dict.fromkeys(keyword for keywords in _KEYWORDS.values() for keyword in keywords))
REFUSED = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef"),
    *("$recursiveRef", "contains", "minContains", "maxContains", "uniqueItems", "additionalItems"),
)
_HARMLESS: dict[str, tuple[Any, ...]] = {"uniqueItems": (False,)}

_PYTHON_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_BUILTIN_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference"),
    *("uri-template", "uuid", "json-pointer", "relative-json-pointer"),
)
_LENGTHS: dict[str, tuple[int, int | None]] = {
    "date": (10, 10),
    "uuid": (36, 36),
    "ipv4": (7, 15),
    "uri": (2, None),
    "email": (3, None),
    "hostname": (1, None),
}
"""Least and most characters of a format's texts."""
_NOTHING: tuple[Any, ...] = (False, {"not": {}}, {"not": True})
_NOT_MERGED = {
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "const",
    "enum",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
} | {*("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "items", "prefixItems", "additionalItems")}
_SUBSCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def parsed_json(source: str) -> Any:
    """Raises ValueError for what is not JSON, or too deep for Python."""
    try:
        return json.loads(source, parse_constant=_refuse_constant, parse_int=_int, parse_float=_float)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _int(digits: str) -> int:
    _float(digits)
    return int(digits)


def _float(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"the number {digits[:20]}… is too large")
    return number


def enforceable(schema: Any, pattern_for: Callable[[str], str], depth: int = 0) -> Any:
    """The schema for xgrammar's strict mode. Raises ValueError for what it would not enforce.

    `pattern_for` gives a pattern the form in which it gets that, or raises ValueError.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"the schema is nested more than {MAX_DEPTH} deep")
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, true or false; got {_short(schema)}")
    schema = modern(schema)
    for keyword in REFUSED:
        if keyword in schema and schema[keyword] not in _HARMLESS.get(keyword, ()):
            raise ValueError(f"{keyword} is not supported")
    if form := next((keyword for keyword in _FORMS if keyword in schema), None):
        _check_form(schema, form)
    else:
        _check_typed(schema)
    enforced = with_subschemas(_opened(schema), lambda inner, _: enforceable(inner, pattern_for, depth + 1))
    if isinstance(enforced.get("pattern"), str):
        enforced["pattern"] = pattern_for(enforced["pattern"])
    if isinstance(patterns := enforced.get("patternProperties"), dict):
        enforced["patternProperties"] = {pattern_for(each): inner for each, inner in patterns.items()}
    return enforced


def modern(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema in the terms that are enforced: no lists of items, no empty cases, one schema for several."""
    schema = _without_superfluous(_merged(schema))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(cases := schema.get(keyword), list) and (
            some := [each for each in cases if each not in _NOTHING]
        ):
            schema = {**schema, keyword: some}
    if "items" in schema and isinstance(prefix := schema["items"], list):  # as drafts up to 7 write it
        rest = {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
        others = {key: value for key, value in schema.items() if key not in ("items", "additionalItems")}
        schema = {**others, **({"prefixItems": prefix} if prefix else {}), **rest}
    elif "additionalItems" in schema:  # which means nothing here
        schema = {key: value for key, value in schema.items() if key != "additionalItems"}
    return schema


def _merged(schema: dict[str, Any]) -> dict[str, Any]:
    """Without allOf, where its schemas can be told in one: their keywords differ, or list properties of other names."""
    cases = schema.get("allOf")
    if not isinstance(cases, list) or not cases or not all(isinstance(each, dict) for each in cases):
        return schema
    whole = {key: value for key, value in schema.items() if key != "allOf"}
    if len(cases) == 1 and not whole.keys() & {"type", *_FORMS, *TYPED}:
        return schema
    for case in map(modern, cases):
        if case.keys() & _NOT_MERGED or whole.keys() & _NOT_MERGED:
            return schema
        for keyword, value in case.items():
            if keyword not in whole or keyword not in {"type", *_FORMS, *TYPED, *REFUSED, *_NAMED}:
                whole.setdefault(keyword, value)
            elif keyword == "required" and _are_texts(value) and _are_texts(whole[keyword]):
                whole[keyword] = [*dict.fromkeys([*whole[keyword], *value])]
            elif keyword in _NAMED and isinstance(value, dict) and isinstance(whole[keyword], dict):
                if any(whole[keyword].get(name, inner) != inner for name, inner in value.items()):
                    return schema
                whole[keyword] = {**whole[keyword], **value}
            elif whole[keyword] != value:
                return schema
    return whole


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _without_superfluous(schema: dict[str, Any]) -> dict[str, Any]:
    """Without lengths that the format has anyway."""
    form = schema.get("format")
    if not isinstance(form, str) or form not in _LENGTHS:
        return schema
    least, most = _LENGTHS[form]
    low, high = schema.get("minLength"), schema.get("maxLength")
    superfluous = [
        *(["minLength"] if isinstance(low, int) and low <= least else []),
        *(["maxLength"] if most is not None and isinstance(high, int) and high >= most else []),
    ]
    return {key: value for key, value in schema.items() if key not in superfluous}


def _short(value: Any) -> str:
    return json.dumps(value)[:60]


def _check_form(schema: dict[str, Any], form: str) -> None:
    typed = {"type"} if form in ("const", "enum") else set()
    beside = [keyword for keyword in schema if keyword in {"type", *_FORMS, *TYPED} - typed - {form}]
    if beside:
        raise ValueError(f"{beside[0]} beside {form} is not supported")
    value = schema[form]
    if form == "$ref":
        start, *rest = value.split("/") if isinstance(value, str) else [""]
        if start != "#" or (rest and rest[0] not in (*_SUBSCHEMAS, *_LISTS, *_NAMED)):
            raise ValueError(f"$ref {_short(value)} does not point to a part of the schema")
    elif form != "const" and (not isinstance(value, list) or not value):
        raise ValueError(f"{form} must be a list that is not empty")
    if form == "allOf" and len(value) > 1:
        raise ValueError("allOf of more than one schema is not supported")
    if typed and "type" in schema:
        for each in value if form == "enum" else [value]:
            if not any(_PYTHON_TYPES[kind](each) for kind in _types(schema)):
                raise ValueError(f"{form} holds {_short(each)}, which is not of type {_short(schema['type'])}")


def _types(schema: dict[str, Any]) -> list[str]:
    given = schema["type"]
    types = given if isinstance(given, list) else [given]
    for each in types:
        if not isinstance(each, str) or each not in _PYTHON_TYPES:
            raise ValueError(f"type must be one of {', '.join(_PYTHON_TYPES)}; got {_short(each)}")
    if not types:
        raise ValueError("type must not be an empty list")
    return types


def _check_typed(schema: dict[str, Any]) -> None:
    if "type" not in schema:
        implied = ("properties", "additionalProperties", "unevaluatedProperties", "items", "prefixItems")
        keyword = next((each for each in schema if each in TYPED), None)
        if keyword is not None and not any(each in schema for each in (*implied, "unevaluatedItems")):
            raise ValueError(f"{keyword} needs a type beside it")
    types = _types(schema) if "type" in schema else ["object", "array"]
    for kind in types:
        if check := _CHECKS.get(kind):
            check(schema)


def _check_string(schema: dict[str, Any]) -> None:
    limits = [keyword for keyword in ("minLength", "maxLength") if keyword in schema]
    pattern, form = schema.get("pattern"), schema.get("format")
    if pattern is not None and not isinstance(pattern, str):
        raise ValueError("pattern must be a string")
    if form is not None and not isinstance(form, str):
        raise ValueError("format must be a string")
    builtin = form in _BUILTIN_FORMATS
    if (pattern is not None or builtin) and limits:
        raise ValueError(f"{limits[0]} beside {'format' if builtin else 'pattern'} is not supported")
    if pattern is not None and builtin:
        raise ValueError("pattern beside format is not supported")
    for keyword in limits:
        _check_count(schema, keyword)


def _check_number(schema: dict[str, Any]) -> None:
    if "multipleOf" in schema:
        raise ValueError("multipleOf is not supported, but for integers up to 1024 without a range")


def _check_integer(schema: dict[str, Any]) -> None:
    bounds = [keyword for keyword in _KEYWORDS["integer"][:4] if keyword in schema]
    step = schema.get("multipleOf")
    if "multipleOf" in schema and (bounds or not isinstance(step, int) or not 1 <= step <= 1024):
        _check_number(schema)


def _check_array(schema: dict[str, Any]) -> None:
    if "prefixItems" in schema and (not isinstance(schema["prefixItems"], list) or not schema["prefixItems"]):
        raise ValueError("prefixItems must be a list that is not empty")
    for keyword in ("minItems", "maxItems"):
        _check_count(schema, keyword)


def _check_object(schema: dict[str, Any]) -> None:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise ValueError("properties must be an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError("required must be a list of names")
    for name in required:
        if name not in properties:
            raise ValueError(f"required names {_short(name)}, which properties does not")
    for keyword in ("minProperties", "maxProperties"):
        _check_count(schema, keyword)
    _check_other_names(schema)


def _check_other_names(schema: dict[str, Any]) -> None:
    names = [keyword for keyword in ("patternProperties", "propertyNames") if keyword in schema]
    if not names:
        return
    additional = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    fits = additional in (None, False) if names[0] == "patternProperties" else additional is not False
    if schema.get("properties") or len(names) > 1 or not fits:
        beside = "properties" if schema.get("properties") else [*names, "additionalProperties"][1]
        raise ValueError(f"{names[0]} beside {beside} is not supported")
    patterns = schema.get("patternProperties", {"": True})
    if not isinstance(patterns, dict) or len(patterns) != 1:
        raise ValueError("patternProperties must hold one pattern")


_CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "string": _check_string,
    "number": _check_number,
    "integer": _check_integer,
    "array": _check_array,
    "object": _check_object,
}


def _check_count(schema: dict[str, Any], keyword: str) -> None:
    value = schema.get(keyword, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{keyword} must be a count; got {_short(value)}")


def _opened(schema: dict[str, Any]) -> dict[str, Any]:
    """Strict mode would leave nothing but {} and [] of what the schema does not describe."""
    types = schema.get("type", [])
    kinds = types if isinstance(types, list) else [types]
    described = ("properties", "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
    opened = dict(schema)
    if "object" in kinds and not any(keyword in schema for keyword in described):
        opened["additionalProperties"] = True
    if "array" in kinds and not any(keyword in schema for keyword in ("items", "prefixItems", "unevaluatedItems")):
        opened["items"] = {}
    return opened


def with_subschemas(schema: dict[str, Any], convert: Callable[[Any, str], Any]) -> dict[str, Any]:
    """The schema with its parts converted; `convert` also gets a part's name, or the keyword that holds it."""
    converted = dict(schema)
    for keyword in _SUBSCHEMAS:
        if keyword in schema:
            converted[keyword] = convert(schema[keyword], keyword)
    if isinstance(names := schema.get("propertyNames"), dict):
        typed = any(keyword in names for keyword in ("type", *_FORMS))
        converted["propertyNames"] = convert(names if typed else {"type": "string", **names}, "propertyNames")
    for keyword in _LISTS:
        if isinstance(cases := schema.get(keyword), list):
            converted[keyword] = [convert(each, keyword) for each in cases]
    for keyword in _NAMED:
        if isinstance(named := schema.get(keyword), dict):
            converted[keyword] = {name: convert(each, name) for name, each in named.items()}
    return converted
