"""JSON schemas of the structs, with what their types do not say: refused fields, ranges, descriptions."""

from collections.abc import Iterator
from typing import Any

import msgspec

from configs.sampling import SamplingParams
from server.openapi.docstrings import field_docs
from server.openapi.values import details
from server.protocol.common import RequestBody
from server.serving import Serving

_TEMPLATE = "#/components/schemas/{name}"
Schema = dict[str, Any]


class Schemas:
    """Of `types` and all structs in them, as the server of `serving` takes and gives them."""

    def __init__(self, types: list[Any], serving: Serving) -> None:
        found = {info.cls: None for info in _structs(msgspec.inspect.multi_type_info(types), set())}
        everything = [*types, *found]
        refs, self.components = msgspec.json.schema_components(everything, ref_template=_TEMPLATE)
        self._refs = dict(zip(everything, refs, strict=True))
        for struct in found:
            self._describe(struct, serving)

    def ref(self, kind: Any) -> Schema:
        found: Schema = self._refs[kind]
        return found

    def any_of(self, kinds: tuple[Any, ...]) -> Schema:
        return self._refs[kinds[0]] if len(kinds) == 1 else {"anyOf": [self._refs[kind] for kind in kinds]}

    def struct(self, kind: type) -> Schema:
        """What `ref` points to."""
        schema: Schema = self.components[self._refs[kind]["$ref"].rpartition("/")[2]]
        return schema

    def _describe(self, struct: type, serving: Serving) -> None:
        schema = self.struct(struct)
        properties = schema["properties"]
        documented = field_docs(struct)
        for name in properties:
            if text := documented.get(name) or (_SAMPLING.get(name) if issubclass(struct, RequestBody) else None):
                properties[name] = {**properties[name], "description": text}
        if issubclass(struct, RequestBody):
            _describe_body(schema, struct, serving)


def _describe_body(schema: Schema, body: type[RequestBody], serving: Serving) -> None:
    properties = schema["properties"]
    for name, change in details(body, serving).items():
        properties[name] = change(properties[name])
    for name, allowed in body.unsupported.items():
        properties[name] = {"enum": [None, *allowed], "description": "Not supported but for what asks for nothing"}
    for name in sorted(body.hints):
        properties[name] = {"description": "A hint that nothing follows from"}
    for name in sorted(body.without_effect):
        properties[name] = {"description": "Changes nothing"}
    if body.one_of:
        schema["oneOf"] = [_given(name) for name in body.one_of]
    if serving.config.strict_fields:
        schema["additionalProperties"] = False


def _given(*names: str) -> Schema:
    return {"required": [*names], "properties": {name: {"not": {"type": "null"}} for name in names}}


def _structs(infos: Any, seen: set[int]) -> Iterator[msgspec.inspect.StructType]:
    """All in the trees of types, each once."""
    for info in infos:
        if id(info) in seen:
            continue
        seen.add(id(info))
        if isinstance(info, msgspec.inspect.StructType):
            yield info
            yield from _structs([field.type for field in info.fields], seen)
            continue
        parts = [getattr(info, name, None) for name in ("item_type", "key_type", "value_type", "type")]
        yield from _structs([part for part in parts if isinstance(part, msgspec.inspect.Type)], seen)
        yield from _structs([*getattr(info, "types", ()), *getattr(info, "item_types", ())], seen)


_SAMPLING = field_docs(SamplingParams)
