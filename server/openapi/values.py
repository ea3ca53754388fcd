"""What fields of bodies may hold beyond their types: the ranges that `SamplingParams` and `server/convert/` check.

tests/server/test_openapi.py compares them with those checks.
"""

from collections.abc import Callable, Mapping
from typing import Any

from configs.sampling import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_WORD
from server.protocol.common import RequestBody, SamplingFields
from server.serving import Serving

Schema = dict[str, Any]
Change = Callable[[Schema], Schema]

RANGES: Mapping[type[RequestBody], Mapping[str, Schema]] = {
    SamplingFields: {
        "n": {"minimum": 1},
        "max_tokens": {"minimum": 0},
        "min_tokens": {"minimum": 0},
        "temperature": {"minimum": 0},
        "top_k": {"minimum": -1},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "repetition_penalty": {"exclusiveMinimum": 0},
        "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
        "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    },
}
"""Of numbers. The fields of a class hold for those derived from it."""


def details(body: type[RequestBody], serving: Serving) -> dict[str, Change]:
    """By field of `body`: how the schema of its type changes."""
    changes: dict[str, Change] = {}
    for one in reversed(body.__mro__):
        changes |= {name: _number(bounds) for name, bounds in RANGES.get(one, {}).items()}
        changes |= _others(serving).get(one, {})
    return {name: change for name, change in changes.items() if name in body.__struct_fields__}


def _others(serving: Serving) -> dict[type, dict[str, Change]]:
    config, vocabulary = serving.config, {"minimum": 0, "maximum": serving.engine.info.vocab_size - 1}
    tokens = _number(vocabulary)
    names = [*serving.models, *(f"{name}:latest" for name in serving.models), ""]
    stop_string = {"type": "string", "minLength": 1, "maxLength": config.max_stop_chars}
    stop = [stop_string, {"type": "array", "items": stop_string, "maxItems": config.max_stop_strings}]
    return {
        RequestBody: {"model": _replaced({"enum": names})},
        SamplingFields: {
            "stop": _replaced(*stop),
            "bad_words": _replaced(
                {
                    "type": "array",
                    "maxItems": MAX_BAD_WORDS,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_WORD},
                }
            ),
            "logit_bias": lambda schema: _bias(schema, vocabulary["maximum"]),
            **dict.fromkeys(("stop_token_ids", "bad_token_ids", "allowed_token_ids", "logprob_token_ids"), tokens),
        },
    }


def _number(bounds: Schema) -> Change:
    """Numbers anywhere in the schema are within these bounds."""

    def change(schema: Schema) -> Schema:
        changed = {name: _map(value, change) for name, value in schema.items() if name in ("anyOf", "items")}
        if schema.get("type") in ("integer", "number"):
            changed |= bounds
        return {**schema, **changed}

    return change


def _map(value: Any, change: Change) -> Any:
    return [change(one) for one in value] if isinstance(value, list) else change(value)


def _replaced(*schemas: Schema) -> Change:
    """One of these, or null where that was allowed."""

    def change(schema: Schema) -> Schema:
        nullable = {"type": "null"} in schema.get("anyOf", ())
        branches = [*schemas, *([{"type": "null"}] if nullable else [])]
        default = {"default": schema["default"]} if "default" in schema else {}
        return {**(branches[0] if len(branches) == 1 else {"anyOf": branches}), **default}

    return change


def _list(schema: Schema, most: int) -> Schema:
    """Lists on the outside hold one to `most` items."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_list(one, most) for one in schema["anyOf"]]}
    return {**schema, "minItems": 1, "maxItems": most} if schema.get("type") == "array" else schema


def _bias(schema: Schema, last_id: int) -> Schema:
    digits = len(str(last_id)) - 1
    shorter = f"|[1-9][0-9]{{0,{digits - 1}}}" if digits else ""
    return _replaced(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^(0{shorter})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    )(schema)
