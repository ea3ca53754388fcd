"""From the sampling fields of /v1/responses to those of `SamplingParams`."""

from typing import Any

import msgspec

from configs.sampling import SamplingParams
from configs.settings import ServerConfig
from server.protocol.common import SamplingFields
from server.sampling import check_stop

SAME_NAME = {field.name for field in msgspec.structs.fields(SamplingParams)} & {
    field.name for field in msgspec.structs.fields(SamplingFields)
} - {"max_tokens", "stop"}
"""Fields that mean the same in a request and in `SamplingParams`."""


def given_fields(fields: SamplingFields, config: ServerConfig) -> dict[str, Any]:
    """Those that mean the same in `SamplingParams`. Raises `InvalidRequest`."""
    given = {name: value for name in SAME_NAME if (value := getattr(fields, name)) is not None}
    stop = (fields.stop,) if isinstance(fields.stop, str) else fields.stop or ()
    check_stop(stop, config)
    return {**given, "stop": stop}
