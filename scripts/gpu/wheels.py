"""A package that the machine lacks, from a wheel that was carried along. Knows nothing of the project."""

import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path


def provide(package: str, wheels: Path, into: Path) -> None:
    """Make `package` importable: as it is, or from `wheels`/package-*.whl, unpacked into the folder `into`.

    Ends the program with one line when there is neither.
    """
    if find_spec(package) is not None:
        return
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    fitting = [path for path in sorted(wheels.glob(f"{package}-*.whl")) if f"-{python}-" in path.name]
    if not fitting:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        command = f"pip download --no-deps --only-binary=:all: --python-version {version} -d {wheels} {package}"
        sys.exit(
            f"{package} is not installed, and {wheels} holds no wheel of it for Python {version}; fetch it: {command}"
        )
    with zipfile.ZipFile(fitting[-1]) as wheel:
        wheel.extractall(into)
    sys.path.insert(0, str(into))
