"""Errors in the request's words, where the engine names its own parameters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from configs.errors import InvalidRequest

FieldNames = Mapping[str, str]
"""Parameters of the engine (prompt, or a field of `SamplingParams`) to fields of a request; others keep their names."""


@contextmanager
def naming(names: FieldNames) -> Iterator[None]:
    """Let an `InvalidRequest` that leaves the block name the request's field."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise
