"""`python -m engine.kernels.cpu`: compile the kernels ahead of the first start, or say what is lost without them."""

import torch  # noqa: F401  its OpenMP runtime comes first

from .build import KernelsUnavailable, load_library

try:
    load_library()
except KernelsUnavailable as error:
    print(f"octavo: serving with torch's slower operations: {error}")
