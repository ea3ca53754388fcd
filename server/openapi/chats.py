"""Schemas of what stays plain objects in the structs of chats; `server/convert/chat.py` checks the same."""

from typing import Any

from server.convert.messages import OF_SERVER_TOOLS
from server.convert.tool_results import NOT_TEXT, TEXTS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}


def _object(**properties: Schema) -> Schema:
    """All of them are there."""
    return {"type": "object", "required": [*properties], "properties": properties}


_PARTS: Schema = {
    "type": "array",
    "items": {
        "anyOf": [
            _object(type={"enum": [*TEXTS]}, text=_TEXT),
            _object(type={"const": "refusal"}, refusal=_TEXT),
            {**_object(type={"enum": [*NOT_TEXT, "search_result"]}), "description": "Of what a tool gave"},
        ]
    },
}
_CALL = _object(name=_TEXT, arguments={"description": "JSON of an object, or whatever a model wrote"})
_CALL["required"] = ["name"]
_TOOL_CALL: Schema = {
    "type": "object",
    "properties": {"id": {"type": ["string", "null"]}},
    "anyOf": [
        {"required": ["function"], "properties": {"type": {"const": "function"}, "function": _CALL}},
        _object(type={"const": "custom"}, custom=_object(name=_TEXT)),
    ],
}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {**_NAME, "examples": ["system", "user", "assistant", "tool"]},
            "content": {"anyOf": [_TEXT, _PARTS, {"type": "null"}]},
            "tool_calls": {"anyOf": [{"type": "array", "items": _TOOL_CALL}, {"type": "null"}]},
            "function_call": {"anyOf": [_CALL, {"type": "null"}]},
            "tool_call_id": {"type": ["string", "null"]},
        },
        "anyOf": [
            {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
            {"properties": {"role": {"enum": ["assistant", "tool", "function"]}}},
        ],
    },
}


def _other_tools(*types: str) -> Schema:
    return {
        **_object(type={"type": "string", "not": {"enum": [*types]}}),
        "description": "Of the server's own, which are passed over",
    }


_FUNCTION = _object(name=_NAME, parameters={"type": ["object", "null"], "description": "A JSON schema"})
_FUNCTION["required"] = ["name"]
TOOLS: Schema = {
    "type": "array",
    "items": {"anyOf": [_object(type={"const": "function"}, function=_FUNCTION), _other_tools("function")]},
}
FUNCTIONS: Schema = {"type": "array", "items": _FUNCTION}
FUNCTION_CALL: tuple[Schema, ...] = ({"enum": ["auto", "none"]}, _object(name=_NAME))
TOOL_CHOICE: tuple[Schema, ...] = (
    {"enum": ["auto", "none", "required"]},
    {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"const": "function"},
        },
        "anyOf": [
            {
                "required": ["function"],
                "properties": {"function": {"type": "object", "required": ["name"], "properties": {"name": _NAME}}},
            },
            {"required": ["name"], "properties": {"name": _NAME}},
        ],
    },
    _object(type={"const": "allowed_tools"}),
)
_JSON_SCHEMA: Schema = {
    "type": "object",
    "required": ["schema"],
    "properties": {"schema": {"type": ["object", "boolean"]}},
}
RESPONSE_FORMAT: Schema = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["text", "json_object", "structural_tag"]}},
        },
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {"type": {"const": "json_schema"}, "json_schema": _JSON_SCHEMA},
        },
        {
            "type": "object",
            "required": ["type", "schema"],
            "properties": {"type": {"const": "json_schema"}, **_JSON_SCHEMA["properties"]},
            "not": {"required": ["json_schema"]},
        },
    ]
}


def _block(kind: str, **properties: Schema) -> Schema:
    return _object(type={"const": kind}, **properties)


TURNS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {
                "anyOf": [
                    _TEXT,
                    {
                        "type": "array",
                        "items": {
                            "anyOf": [
                                _block("text", text=_TEXT),
                                _block("thinking", thinking=_TEXT),
                                _block("redacted_thinking"),
                                _block("tool_use", id=_TEXT, name=_TEXT),
                                _block("tool_result", tool_use_id=_TEXT),
                                _object(type={"enum": [*OF_SERVER_TOOLS]}),
                                _object(type={"type": "string", "pattern": "_tool_result$"}),
                            ]
                        },
                    },
                ]
            },
        },
    },
}
"""Anthropic's messages; which blocks there may be depends on the role."""
SYSTEM: tuple[Schema, ...] = (_TEXT, {"type": "array", "items": _block("text", text=_TEXT)})
CUSTOM_TOOLS: Schema = {
    "type": "array",
    "items": {
        "anyOf": [
            {
                "type": "object",
                "required": ["name", "input_schema"],
                "properties": {
                    "type": {"enum": [None, "custom"]},
                    "name": _NAME,
                    "input_schema": {"type": "object", "description": "A JSON schema"},
                },
            },
            _other_tools("custom"),
        ]
    },
}
