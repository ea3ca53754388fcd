"""Parameters of the queries of URLs."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class RetrieveQuery(msgspec.Struct, kw_only=True):
    """Of GET /v1/responses/{id}."""

    stream: bool = False
    """The events instead of the response."""
    starting_after: Annotated[int, Meta(ge=-1)] = -1
    """Number of the last event that is not wanted."""
    include_obfuscation: bool = False
    """Only false is honoured: events are not padded."""


class InputItemsQuery(msgspec.Struct, kw_only=True):
    """Of GET /v1/responses/{id}/input_items."""

    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str = ""
    """Id of the item before the page."""
