"""tokenizer.json folders, decoding, and what holds for every tokenizer."""

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import (
    CORPUS_TEXTS,
    as_tokenizer,
    byte_level_vocabulary,
    sentencepiece_model,
    sentencepiece_vocabulary,
)
from tokenizers import AddedToken, decoders

from configs.errors import CheckpointError
from engine.checkpoints.checkpoint import Checkpoint, TokenizerFiles
from engine.models.config import ModelConfig, RopeConfig
from engine.text.gguf_vocab import build_tokenizer, merges_from_scores
from engine.text.tokenizer import Tokenizer, load_tokenizer

BACKEND = build_tokenizer(byte_level_vocabulary())
BYTE_LEVEL = as_tokenizer(byte_level_vocabulary())
SENTENCEPIECE = as_tokenizer(sentencepiece_vocabulary(sentencepiece_model()))
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=True,
)


def load(folder, **tokenizer_config) -> Tokenizer:
    checkpoint = Checkpoint(
        path=folder,
        name="tiny",
        config=CONFIG,
        generation_config={},
        eos_token_ids=(),
        tokenizer_source=TokenizerFiles(folder, tokenizer_config),
        chat_templates={"default": "{{ messages }}"},
        tensors={},
    )
    return load_tokenizer(checkpoint)


@pytest.fixture
def folder(tmp_path):
    """tokenizer.json with <|start|> put before the text, and <|end|> and <think> in the vocabulary."""
    build_tokenizer(byte_level_vocabulary(add_bos_token=True)).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
)
def test_ids_of_a_folder_equal_transformers(folder, flags):
    """Both take what surrounds the text from tokenizer.json, whatever the flags say."""
    transformers = pytest.importorskip("transformers")
    names = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    tokenizer = load(folder, **names, **flags)
    bare = tokenizer.encode("Hello", add_special_tokens=False)
    ids = tokenizer.encode("Hello")
    assert ids == [tokenizer.bos_token_id, *bare]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names, **flags})
    )
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    for text in CORPUS_TEXTS:
        assert tokenizer.encode(text) == oracle.encode(text)


def test_a_sentencepiece_folder_equals_transformers(tmp_path):
    """One bos, no text that begins with a space: transformers and sentencepiece differ there."""
    transformers = pytest.importorskip("transformers")
    vocabulary = sentencepiece_vocabulary(sentencepiece_model())
    oracle = transformers.LlamaTokenizer(
        vocab={token: i for i, token in enumerate(vocabulary.tokens)}, merges=merges_from_scores(vocabulary)
    )
    oracle.save_pretrained(tmp_path)
    tokenizer = load(tmp_path, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    for text in CORPUS_TEXTS:
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_names_from_both_spellings_of_the_configuration(folder):
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<think>", "pad_token": "<|end|>"}')
    tokenizer = load(folder, bos_token={"content": "<|start|>", "lstrip": False}, eos_token="<|end|>")
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    assert tokenizer.bos_token_id == BYTE_LEVEL.bos_token_id
    assert tokenizer.chat_template == "{{ messages }}"


def test_tokens_that_only_the_configuration_calls_special(folder):
    plain = load(folder)
    marked = load(folder, additional_special_tokens=["<think>"])
    [think] = marked.encode("<think>", add_special_tokens=False)
    assert think in marked.special_ids
    assert think not in plain.special_ids


TOOL = {"content": "<tool>", "special": False, "normalized": False}
CALL = {"content": "<call>", "special": True, "normalized": False, "lstrip": True}
WORD = {"content": "harbour", "special": False, "single_word": True}


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"474": TOOL}},
        {"added_tokens_decoder": {"476": TOOL, "474": CALL, "475": WORD}},
        {"added_tokens_decoder": {"500": CALL, "490": TOOL}},  # ids with gaps
        {"added_tokens_decoder": {"474": TOOL}, "pad_token": "[PAD]", "additional_special_tokens": ["<more>"]},
        {"added_tokens_decoder": {"0": {"content": "<|start|>", "special": True, "lstrip": True, "normalized": False}}}
        | {"pad_token": "[PAD]"},
        {"pad_token": "[PAD]", "eos_token": {"__type": "AddedToken", "content": "<stop>", "lstrip": True}},
    ],
)
def test_tokens_that_only_the_configuration_knows_have_the_ids_of_transformers(folder, config):
    transformers = pytest.importorskip("transformers")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = load(folder, **config)
    text = "a   <|start|>  <tool><call> harbour harbours  <call>[PAD]<more> <stop>\n<tool>"
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.vocab_size == len(oracle) > load(folder).vocab_size
    for skip in (True, False):
        assert tokenizer.decode(oracle.encode(text), skip) == oracle.decode(oracle.encode(text), skip)


def test_a_token_for_which_the_model_has_no_embedding_is_not_added(folder):
    size = load(folder).vocab_size
    many = {str(size + i): TOOL | {"content": f"<tool{i}>"} for i in range(CONFIG.vocab_size)}
    assert load(folder, added_tokens_decoder=many).vocab_size == CONFIG.vocab_size
    assert load(folder, added_tokens_decoder=many, pad_token="[PAD]").vocab_size == CONFIG.vocab_size


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": ["x"]},
        {"added_tokens_decoder": {"x": TOOL}},
        {"added_tokens_decoder": {"9": "<tool>"}},
        {"added_tokens_decoder": {"9": {"content": 9}}},
        {"added_tokens_decoder": {"9": TOOL | {"lstrip": "yes"}}},
        {"additional_special_tokens": 9},
        {"additional_special_tokens": [9]},
        {"eos_token": ["x"]},
    ],
    ids=str,
)
def test_malformed_tokens_of_the_configuration_are_refused(folder, config):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load(folder, **config)


def test_configuration_entries_of_added_tokens(folder):
    """`z` is a token of the alphabet; as an added token that takes the spaces before it, it stays one token."""
    entry = {"content": "z", "special": True, "lstrip": True, "rstrip": False, "normalized": False}
    tokenizer = load(folder, added_tokens_decoder={"7": entry}, extra_special_tokens={"image_token": "y"})
    z, y = tokenizer.encode("  z", add_special_tokens=False), tokenizer.encode("y", add_special_tokens=False)
    assert len(z) == len(y) == 1
    assert z[0] in tokenizer.special_ids
    assert y[0] in tokenizer.special_ids


def test_stored_truncation_and_padding_do_not_matter(folder):
    backend = build_tokenizer(byte_level_vocabulary())
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert load(folder).encode("Hello there, world") == BYTE_LEVEL.encode("Hello there, world")


def test_a_folder_without_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load(tmp_path)


def test_a_broken_tokenizer_json_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Fuse()])])
def test_decoders_of_another_kind_are_refused(decoder):
    backend = build_tokenizer(byte_level_vocabulary())
    if decoder is None:
        backend = backend.from_str(json.dumps({**json.loads(backend.to_str()), "decoder": None}))
    else:
        backend.decoder = decoder
    with pytest.raises(CheckpointError, match="decoder"):
        Tokenizer(backend, {})


def test_metaspace_decoder_counts_as_sentencepiece():
    backend = build_tokenizer(sentencepiece_vocabulary(sentencepiece_model()))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, {})
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"


@BOTH
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_texts_round_trip(tokenizer, text):
    """SentencePiece writes a space as U+2581, so that a text's own comes back as a space."""
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@given(ids=st.lists(st.integers(0, 473), max_size=40))
def test_decoding_any_ids_equals_the_library(ids):
    assert BYTE_LEVEL.decode(ids) == BACKEND.decode(ids, skip_special_tokens=True)


@BOTH
def test_ids_beyond_the_vocabulary_are_empty(tokenizer):
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    ids = tokenizer.encode("Hello")
    assert tokenizer.decode([*ids, 10**6, *tokenizer.encode("!", add_special_tokens=False)]).startswith("Hello")


@BOTH
def test_token_bytes_join_to_the_text(tokenizer):
    for text in CORPUS_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids))
        assert joined.removeprefix(b" " * tokenizer.leading_spaces).decode() == text


@BOTH
def test_lone_surrogates_count_as_the_replacement_character(tokenizer):
    assert tokenizer.encode("a\ud800b\udfff") == tokenizer.encode("a\ufffdb\ufffd")


def test_clean_up_of_spaces_stays_off():
    text = " 'manual' , it 's fine . Is n't it ?"
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


def test_added_tokens_outside_the_byte_alphabet_are_plain_text():
    backend = build_tokenizer(byte_level_vocabulary())
    backend.add_tokens([AddedToken("<｜tool｜>", normalized=False)])
    tokenizer = Tokenizer(backend, {})
    assert tokenizer.decode(tokenizer.encode("a<｜tool｜>b")) == "a<｜tool｜>b"


def test_other_threads_run_while_a_long_text_is_encoded():
    text = "Hello there, the quick brown fox. " * 40_000
    done = threading.Event()
    worker = threading.Thread(target=lambda: (BYTE_LEVEL.encode(text), done.set()))
    worker.start()
    turns = 0
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    worker.join()
    assert turns > 10
