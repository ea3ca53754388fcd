"""The version that is installed."""

from importlib import metadata


def version() -> str:
    """Of the installed distribution; a bare checkout has none."""
    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "0+unknown"
