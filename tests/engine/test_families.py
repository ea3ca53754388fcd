"""Records of families: all are tested, documented, small, and refuse what they do not honour."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from configs.errors import CheckpointError
from configs.sampling import SamplingParams
from engine.checkpoints import families, open_checkpoint
from engine.checkpoints.families import FAMILIES
from engine.checkpoints.hf_config import find_architecture, parse_config
from engine.checkpoints.rotary_rows import head_order
from engine.kernels import select_ops
from engine.weights.loader import load_decoder
from engine.weights.precision import Precision, Setting
from scripts.models_page import PAGE, document
from tests.engine.core_runs import make_core, random_prompts, token_ids
from tests.engine.paged_runs import load, prefill, torch_ops
from tests.engine.test_checkpoints_hf_folder import WEIGHTS, edit_json
from tests.engine.test_models_logits import (
    FAMILY_CONFIGS,
    GEMMA_ROPES,
    GPT_SIZES,
    GRANITE_4,
    MIXED,
    assert_equal_logits,
    hf_logits,
    random_tokens,
)
from tests.engine.tiny_gguf import write_gguf
from tests.engine.tiny_models import SMALL, tiny_model, write_tiny, write_tokenizer

FILE = Path("config.json")
MODEL_TYPE = re.compile("_|text$")
MAX_LINES = 60
"""Of a file of records."""


def test_every_family_is_compared_with_transformers() -> None:
    tested = {AutoConfig.for_model(name).__class__.__name__.removesuffix("Config") for name, _ in FAMILY_CONFIGS}
    tested = {name.removesuffix("Text") for name in tested}
    assert tested == {family.name for family in FAMILIES}


@pytest.mark.parametrize("path", sorted(Path(families.__path__[0]).glob("*.py")), ids=lambda path: path.stem)
def test_records_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_names_are_told_apart() -> None:
    names = [name for family in FAMILIES for name in (family.name, *family.also)]
    assert len(names) == len(set(names))
    gguf = [name for family in FAMILIES for name in family.gguf]
    assert len(gguf) == len(set(gguf))


def test_the_page_of_models_is_kept() -> None:
    """Mend it with `python scripts/models_page.py`."""
    assert PAGE.read_text() == document()


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "residual_multiplier", 0.22),
        ("llama", "clip_qkv", 8.0),
        ("llama", "num_local_experts", 8),
        ("llama", "no_rope_layers", [1, 1, 0]),
        ("llama", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("llama", "layer_types", 7),
        ("qwen3", "attn_logit_softcapping", 50.0),
        ("qwen3", "use_bidirectional_attention", True),
        ("stablelm", "use_parallel_residual", True),
        ("cohere", "use_qk_norm", True),
        ("granitemoehybrid", "num_local_experts", 4),
        ("granitemoehybrid", "layer_types", ["mamba", "attention", "attention"]),
        ("qwen2", "layer_types", ["linear_attention"] * 3),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("mistral", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}),
        ("qwen2", "rope_scaling", {"rope_type": "default", "mrope_section": [2, 3, 3]}),
    ],
)
def test_what_is_not_honoured_is_refused_by_key(tmp_path: Path, family: str, key: str, value: Any) -> None:
    own = GRANITE_4 if family == "granitemoehybrid" else {}
    write_tiny(tmp_path, family, **own)
    edit_json(tmp_path / "config.json", **{key: value}, **({"use_sliding_window": True} if family == "qwen2" else {}))
    words = list(value)[-1] if isinstance(value, dict) else key
    with pytest.raises(CheckpointError, match=rf"config\.json: [\w.]*{words}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [None, 1, 1.0])
def test_what_is_off_is_no_reason_to_refuse(tmp_path: Path, value: Any) -> None:
    write_tiny(tmp_path)
    edit_json(tmp_path / "config.json", residual_multiplier=value, num_experts=0, final_logit_softcapping=None)
    assert open_checkpoint(tmp_path).notes == ()


@pytest.mark.parametrize(("family", "config"), FAMILY_CONFIGS, ids=str)
def test_what_transformers_writes_is_known(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    write_tiny(tmp_path, family, **config)
    for note in open_checkpoint(tmp_path).notes:
        unknown = note.partition(" passed over: ")[2].split(", ")
        assert set(filter(None, unknown)) <= SMALL.keys() | config.keys()


ODD = [None, True, -1, 0, 0.5, 1e30, float("nan"), "x", [], [1], [None] * 3, {}, {"rope_type": "linear", "factor": 1e9}]


@pytest.mark.parametrize("family", sorted({name for name, _ in FAMILY_CONFIGS}))
def test_any_value_of_any_key_is_taken_or_refused(family: str) -> None:
    own: dict[str, Any] = GPT_SIZES if family.startswith("gpt") and family != "gpt_neox" else {}
    own = GRANITE_4 if family == "granitemoehybrid" else own
    own = own | ({"rotary_dim": 8} if family == "gptj" else {})
    raw = json.loads(AutoConfig.for_model(family, **SMALL | own | {"pad_token_id": 0}).to_json_string(use_diff=False))
    raw["architectures"] = [next(f.name for f in FAMILIES if f.name.lower() == MODEL_TYPE.sub("", family))]
    raw["architectures"][0] += "ForCausalLM"
    parse_config(find_architecture(raw, FILE), FILE, "float32", has_head=True)
    for key in raw:
        for value in ODD:
            with suppress(CheckpointError):
                parse_config(find_architecture(raw | {key: value}, FILE), FILE, "float32", has_head=True)


def test_unknown_keys_are_named_at_start(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    edit_json(tmp_path / "config.json", zeta=3, rope_parameters={"rope_type": "default", "eta": 1})
    [note] = open_checkpoint(tmp_path).notes
    assert note.endswith(": rope_parameters.eta, zeta")


def test_gguf_keys_are_refused_or_named_likewise(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model(), metadata={"attn_logit_softcapping": 50.0})
    with pytest.raises(CheckpointError, match=r"llama\.attn_logit_softcapping 50\.0 is not supported"):
        open_checkpoint(path)
    write_gguf(path, tiny_model(), metadata={"zeta": 3})
    assert open_checkpoint(path).notes == ("m.gguf has keys that are not known and passed over: llama.zeta",)


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 24, "layer_types": MIXED, "rope_parameters": GEMMA_ROPES}),
    ("olmo2", {}),
    ("cohere2", {"sliding_window": 24, "layer_types": MIXED}),
    ("gpt_neox", {}),
    ("gpt2", GPT_SIZES),
]
"""One of each form of a layer."""


@pytest.mark.parametrize(("family", "config"), FORMS, ids=lambda value: value if isinstance(value, str) else "")
def test_tokens_do_not_depend_on_mates_chunks_or_cache(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    model = write_tiny(tmp_path, family, **config)
    prompts, params = random_prompts(6, lengths=(5, 120)), SamplingParams(temperature=0, max_tokens=24)
    core = make_core(tmp_path, attention_backend="cpu", num_threads=2, enable_prefix_caching=False)
    alone = [token_ids(core, [prompt], params)[0] for prompt in prompts]
    for prompt, output in zip(prompts[:2], alone, strict=False):
        assert output == hf_logits(model, prompt + output)[len(prompt) - 1 : -1].argmax(1).tolist()
    assert token_ids(core, prompts, params) == alone
    for settings in ({"max_num_batched_tokens": 17}, {"kv_cache_tokens": 320}):
        other = make_core(tmp_path, attention_backend="cpu", num_threads=2, max_num_seqs=4, **settings)
        assert token_ids(other, prompts, params) == alone
        assert token_ids(other, prompts, params) == alone  # from the prefix cache


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize(("family", "config"), FORMS, ids=lambda value: value if isinstance(value, str) else "")
def test_rounded_weights_equal_their_torch_twin(
    tmp_path: Path, family: str, config: dict[str, Any], bits: Setting
) -> None:
    write_tiny(tmp_path, family, **config)
    checkpoint, tokens = open_checkpoint(tmp_path), random_tokens(40)
    ops, notes = select_ops(checkpoint.config, torch.device("cpu"), torch.float32)
    if notes:
        pytest.skip(notes[0])
    decoders = [
        load_decoder(checkpoint, own, torch.float32, precision=Precision(bits))
        for own in (ops, torch_ops(checkpoint.config))
    ]
    ours, theirs = (prefill(decoder, tokens) for decoder in decoders)
    assert (ours - theirs).norm() < 0.05 * theirs.norm()  # the kernels round activations to 8 bits as well


@pytest.mark.parametrize("form", ["saved", "old", "hub"])
def test_the_text_part_of_a_network_for_images_is_served(tmp_path: Path, form: str) -> None:
    """transformers' names of today, those of 2025 and those that Google wrote."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = SMALL | {"head_dim": 16, "sliding_window": 24, "rope_parameters": GEMMA_ROPES, "layer_types": MIXED}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision | {"image_size": 28})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    if form != "saved":
        old = "language_model.model." if form == "hub" else "model.language_model."
        new = re.compile(r"(model\.language_model|language_model\.model)\.")
        save_file({new.sub(old, name): tensor for name, tensor in tensors.items()}, tmp_path / WEIGHTS)
    checkpoint = open_checkpoint(tmp_path)
    assert any("images" in note for note in checkpoint.notes)
    tokens = random_tokens(100)
    expected = hf_logits(model, tokens)
    assert_equal_logits(prefill(load(tmp_path), tokens), expected)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (8, 4), (16, 12), (12, 6)])
def test_elements_that_turn_together_come_half_a_head_apart(
    head_dim: int, rotary_dim: int, is_interleaved: bool
) -> None:
    order = head_order(head_dim, rotary_dim, is_interleaved=is_interleaved).tolist()
    assert sorted(order) == list(range(head_dim))
    pairs = list(zip(order[: head_dim // 2], order[head_dim // 2 :], strict=True))
    half = rotary_dim // 2
    own = [(2 * i, 2 * i + 1) if is_interleaved else (i, i + half) for i in range(half)]
    assert pairs[:half] == own
