"""gguf_to_hf_folder.py FILE.gguf FOLDER: a GGUF checkpoint as a Hugging Face folder in float32.

transformers reads the file itself, so that the folder is independent of Octavo's own reader.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, target = Path(sys.argv[1]), Path(sys.argv[2])
target.parent.mkdir(parents=True, exist_ok=True)
with TemporaryDirectory(dir=target.parent) as unfinished:
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(unfinished)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(unfinished)
    Path(unfinished).rename(target)
    Path(unfinished).mkdir()
