"""Schemas of what stays plain objects in the structs of chats; `server/convert/chat.py` checks the same."""

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}

_PARTS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": ["text", "input_text"]}, "text": _TEXT},
    },
}
_TOOL_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _TEXT,
                "arguments": {
                    "anyOf": [
                        {"type": "string", "contentMediaType": "application/json"},
                        {"type": ["object", "null"]},
                    ]
                },
            },
        },
    },
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
        },
        "anyOf": [
            {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
            {
                "required": ["tool_calls"],
                "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
            },
        ],
    },
}
TOOLS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": _NAME,
                    "parameters": {"type": ["object", "null"], "description": "A JSON schema"},
                },
            },
        },
    },
}
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
    return {
        "type": "object",
        "required": ["type", *properties],
        "properties": {"type": {"const": kind}, **properties},
    }


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
                                _block("tool_use", id=_TEXT, name=_TEXT, input={"type": "object"}),
                                _block("tool_result", tool_use_id=_TEXT),
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
        "type": "object",
        "required": ["name", "input_schema"],
        "properties": {
            "type": {"enum": [None, "custom"]},
            "name": _NAME,
            "input_schema": {"type": "object", "description": "A JSON schema"},
        },
    },
}
