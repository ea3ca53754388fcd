"""Which chat template renders a chat, and what a malformed one keeps from being answered."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs.errors import InvalidRequest
from configs.settings import EngineConfig
from engine.input_processor import InputProcessor
from tests.engine.test_checkpoints_hf_folder import edit_json
from tests.engine.tiny_gguf import write_gguf
from tests.engine.tiny_models import CHAT_TEMPLATE, tiny_model, write_tiny

CHAT = [{"role": "user", "content": "What is the weather?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TOOL_USE = "{% for tool in tools %}{{ tool.function.name }}: {% endfor %}<tool_call>" + CHAT_TEMPLATE
RAG = "{% for d in documents %}{{ d }}{% endfor %}"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("place", ["list", "mapping", "files"])
@pytest.mark.parametrize("names", [["default"], ["default", "rag"], ["tool_use", "default", "rag"], ["tool_use"]])
def test_the_named_template_that_transformers_takes(
    tmp_path: Path, names: list[str], place: str, tools: list[dict[str, Any]] | None
) -> None:
    write_tiny(tmp_path)
    texts = {"default": CHAT_TEMPLATE, "tool_use": TOOL_USE, "rag": RAG}
    mapping = {name: texts[name] for name in names}
    named: Any = mapping if place == "mapping" else [{"name": n, "template": t} for n, t in mapping.items()]
    edit_json(tmp_path / "tokenizer_config.json", chat_template=None if place == "files" else named)
    if place == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        for name, text in mapping.items():
            places = {"default": "chat_template.jinja"}
            (tmp_path / places.get(name, f"additional_chat_templates/{name}.jinja")).write_text(text)
    inputs = InputProcessor(EngineConfig(model=str(tmp_path)))
    given = {} if tools is None else {"tools": tools}
    if names == ["tool_use"] and tools is None:
        with pytest.raises(InvalidRequest, match="no chat template"):
            inputs.render(CHAT)
        return
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    expected = oracle.apply_chat_template(CHAT, tools=tools, tokenize=False, add_generation_prompt=True)
    assert inputs.render(CHAT, **given) == expected


def byte_level(**others: Any) -> dict[str, Any]:
    """Metadata of a vocabulary in which every letter is a token."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "Ġ", "ab"]
    types = [3, 3, 3] + [1] * (len(tokens) - 3)
    values = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": types, "merges": ["a b"]}
    return {f"tokenizer.ggml.{name}": value for name, value in (values | others).items()}


def gguf_inputs(path: Path, **metadata: Any) -> InputProcessor:
    write_gguf(path, tiny_model(num_hidden_layers=1, vocab_size=99), top_metadata=byte_level() | metadata)
    return InputProcessor(EngineConfig(model=str(path)))


def test_named_templates_of_a_gguf_file(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": CHAT_TEMPLATE, "tokenizer.chat_template.tool_use": TOOL_USE}
    inputs = gguf_inputs(tmp_path / "m.gguf", **templates)
    assert inputs.render(CHAT, tools=TOOLS) == "weather: <tool_call>" + inputs.render(CHAT)
    assert inputs.tool_template == TOOL_USE


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ x", "{% endif %}", "(" * 9 + "{{" + "(" * 9000, "{{ 1 | nofilter }}"]
)
def test_a_malformed_template_refuses_chats_and_nothing_else(tmp_path: Path, template: str) -> None:
    write_tiny(tmp_path / "folder")
    edit_json(tmp_path / "folder" / "tokenizer_config.json", chat_template=template)
    folder = InputProcessor(EngineConfig(model=str(tmp_path / "folder")))
    file = gguf_inputs(tmp_path / "m.gguf", **{"tokenizer.chat_template": template})
    for inputs in (folder, file):
        assert inputs.encode("Hello")
        assert inputs.chat_template is None
        with pytest.raises(InvalidRequest, match="the model's chat template cannot be used") as error:
            inputs.render(CHAT)
        assert error.value.status == 400


@pytest.mark.parametrize(
    ("ids", "tokens", "expected"),
    [
        ({"eos": 2}, {}, {2}),
        ({}, {}, {2}),
        ({"eos": 0}, {}, {0, 2}),
        ({"eos": 50}, {}, {50, 2}),
        ({"eos": 50, "eot": 51, "eom": 52}, {}, {50, 51, 52, 2}),
        ({"eos": 0}, {60: "<|eot_id|>", 61: "<|eom_id|>"}, {0, 2, 60, 61}),
        ({"eos": 0}, {60: "<end_of_turn>", 61: "<|end|>", 62: "<|end_of_text|>"}, {0, 2, 60, 61, 62}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_a_gguf_sequence_ends_at_every_token_that_ends_a_turn(
    tmp_path: Path, ids: dict[str, int], tokens: dict[int, str], expected: set[int], kind: int
) -> None:
    """Whatever the file declares, and however it declares the tokens' types."""
    vocabulary = byte_level()["tokenizer.ggml.tokens"]
    types = [3, 3, kind] + [1] * (len(vocabulary) - 3)
    vocabulary[0] = "<s>"
    for token_id, text in tokens.items():
        vocabulary[token_id], types[token_id] = text, kind
    metadata = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items()}
    metadata |= {"tokenizer.ggml.tokens": vocabulary, "tokenizer.ggml.token_type": types}
    tokenizer = gguf_inputs(tmp_path / "m.gguf", **metadata).tokenizer
    assert set(tokenizer.eos_token_ids) == expected
    for token_id in (2, *tokens):
        assert tokenizer.encode(vocabulary[token_id]) == [token_id]
        assert token_id in tokenizer.special_ids


def test_an_ordinary_word_that_others_use_as_an_end_is_none(tmp_path: Path) -> None:
    vocabulary = byte_level()["tokenizer.ggml.tokens"]
    vocabulary[60], vocabulary[61] = "</s>", "[EOS]"
    types = [3, 3, 3] + [1] * (len(vocabulary) - 4) + [1]
    types[61] = 4
    metadata = {"tokenizer.ggml.tokens": vocabulary, "tokenizer.ggml.token_type": types}
    assert set(gguf_inputs(tmp_path / "m.gguf", **metadata).tokenizer.eos_token_ids) == {0, 2, 61}


def test_several_ends_of_a_gguf_file(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 50, "tokenizer.ggml.eos_token_ids": [50, 51, 4000]}
    assert set(gguf_inputs(tmp_path / "m.gguf", **metadata).tokenizer.eos_token_ids) == {50, 51, 0, 2}
