"""The HTTP server and the command line."""

from functools import cache


@cache
def version() -> str:
    """The version of the installed distribution; a bare checkout has none."""
    from importlib import metadata

    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "0+unknown"
