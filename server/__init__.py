"""The HTTP server and the command line."""


def version() -> str:
    """Of the installed distribution; a bare checkout has none."""
    from importlib import metadata

    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "0+unknown"
