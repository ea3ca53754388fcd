"""A GGUF vocabulary gives the ids of the tokenizer that it was written from."""

import dataclasses
import itertools
import os
from time import perf_counter

import pytest
from tiny_tokenizers import (
    CORPUS_TEXTS,
    SENTENCES,
    as_tokenizer,
    byte_level_vocabulary,
    sentencepiece_model,
    sentencepiece_vocabulary,
)
from tokenizers import Regex, pre_tokenizers

from configs.errors import CheckpointError
from engine.checkpoints import open_checkpoint
from engine.text.gguf_vocab import PRE_TOKENIZERS, build_tokenizer, merges_from_scores
from engine.text.tokenizer import Tokenizer, load_tokenizer

MARKUP = ["<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "a<|im_end|>b", "<repo_name>x", "<|im_start", "<think>"]


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_tokenizer(open_checkpoint(smollm2_path))


@pytest.fixture(scope="module")
def transformers_smollm2(smollm2_path):
    """transformers' reading of the file, plus the digit rule of SmolLM2's tokenizer.json, which it leaves out.

    The vocabulary itself shows the rule: no merge of its 48,900 holds a digit.
    """
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    backend = oracle.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    return oracle


def texts():
    pairs = ["".join(pair) for pair in itertools.permutations([*CORPUS_TEXTS[1:16], *MARKUP[:2]], 2)]
    return [*CORPUS_TEXTS, *SENTENCES, *MARKUP, *pairs]


def test_ids_equal_transformers(smollm2, transformers_smollm2):
    assert len(texts()) > 200
    for text in texts():
        for special in (True, False):
            expected = transformers_smollm2.encode(text, add_special_tokens=special)
            assert smollm2.encode(text, add_special_tokens=special) == expected, text


def test_decoding_equals_transformers(smollm2, transformers_smollm2):
    for text in texts():
        ids = smollm2.encode(text)
        for skip in (True, False):
            expected = transformers_smollm2.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert smollm2.decode(ids, skip_special_tokens=skip) == expected, text


def test_special_ids_and_names(smollm2):
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.vocab_size) == (1, 2, 49152)
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert 2 in smollm2.special_ids
    assert 500 not in smollm2.special_ids
    assert smollm2.chat_template


@pytest.mark.parametrize("names", [("llama-bpe", "llama3"), ("tekken",), ("qwen2",), ("gpt-4o", "llama4")])
def test_split_expressions_cut_as_in_the_published_tokenizers(names):
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name in names:
        published = pre_tokenizers.Split(Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
        ours = pre_tokenizers.Split(Regex(PRE_TOKENIZERS[name].split), behavior="isolated")
        for text in texts():
            assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("qwen35", "I'll go 42\n\n नमस्ते", ["I", "'ll", "Ġgo", "Ġ", "4", "2", "ĊĊ"]),
        (
            "deepseek-coder",
            "def f(x):\n  return x12",
            ["def", "Ġf", "(", "x", "):", "Ċ", "Ġ", "Ġreturn", "Ġx", "1", "2"],
        ),
        ("deepseek-coder", "a\r\nb", ["a", "č", "Ċ", "b"]),
    ],
)
def test_pieces_of_pre_tokenizers_that_cut_in_several_ways(pre, text, pieces):
    backend = build_tokenizer(byte_level_vocabulary(pre=pre)).pre_tokenizer
    found = [piece for piece, _ in backend.pre_tokenize_str(text)]
    assert found[: len(pieces)] == pieces
    marks = backend.pre_tokenize_str("नमस्ते")
    assert (len(marks) == 1) == (pre == "qwen35"), "vowel signs belong to their letters"


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_round_trips(pre):
    tokenizer = as_tokenizer(byte_level_vocabulary(pre=pre))
    for text in (*SENTENCES, "a  1\n\n23 é x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone_where_the_family_says_so():
    ids = as_tokenizer(byte_level_vocabulary(pre="smollm")).encode("\n\n1984")
    whole = as_tokenizer(byte_level_vocabulary(pre="gpt-2")).encode("\n\n1984")
    assert len(ids) >= 5
    assert ids != whole


def test_unknown_pre_tokenizer_is_refused_with_the_known_ones():
    with pytest.raises(CheckpointError, match=r"'nonesuch' is not supported; supported are .*llama-bpe.*smollm"):
        build_tokenizer(byte_level_vocabulary(pre="nonesuch"))


def test_unknown_model_is_refused():
    with pytest.raises(CheckpointError, match="'bert'"):
        build_tokenizer(byte_level_vocabulary(model="bert"))


def test_contradicting_merges_are_refused():
    with pytest.raises(CheckpointError, match="vocabulary cannot be used"):
        build_tokenizer(byte_level_vocabulary(merges=["no such", "token here"]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"token_types": [1, 1]}, "token_type has 2 entries"),
        ({"model": "llama"}, "scores has 0 entries"),
    ],
)
def test_a_vocabulary_that_does_not_fit_together_is_refused(changes, words):
    with pytest.raises(CheckpointError, match=words):
        build_tokenizer(byte_level_vocabulary(**changes))


@pytest.mark.parametrize(
    ("changes", "start", "end"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, ["bos"], []),
        ({"add_bos_token": False, "add_eos_token": True}, [], ["eos"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["bos"], ["eos"]),
        ({"pre": "llama-bpe"}, ["bos"], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"add_bos_token": True, "bos_token_id": None}, [], []),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(changes, start, end):
    vocabulary = byte_level_vocabulary(**changes)
    tokenizer = as_tokenizer(vocabulary)
    ids = {"bos": vocabulary.bos_token_id, "eos": vocabulary.eos_token_id}
    bare = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*(ids[i] for i in start), *bare, *(ids[i] for i in end)]


def test_control_and_user_defined_tokens_stay_whole():
    vocabulary = byte_level_vocabulary()
    tokenizer = as_tokenizer(vocabulary)
    ids = tokenizer.encode("a<|end|><think> b")
    eos, think = vocabulary.eos_token_id, len(vocabulary.tokens) - 1
    assert [i for i in ids if i in (eos, think)] == [eos, think]
    assert eos in tokenizer.special_ids
    assert think not in tokenizer.special_ids
    assert tokenizer.decode(ids) == "a<think> b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|><think> b"


@pytest.fixture(scope="module")
def sentencepiece_bpe():
    return sentencepiece_model()


@pytest.fixture(scope="module")
def llama_like(sentencepiece_bpe) -> Tokenizer:
    return as_tokenizer(sentencepiece_vocabulary(sentencepiece_bpe))


def test_ids_equal_sentencepiece(sentencepiece_bpe, llama_like):
    for text in texts():
        assert llama_like.encode(text, add_special_tokens=False) == sentencepiece_bpe.encode(text), text


def test_decoding_equals_sentencepiece(sentencepiece_bpe, llama_like):
    for text in texts():
        ids = sentencepiece_bpe.encode(text)
        assert llama_like.decode(ids) == sentencepiece_bpe.decode(ids) == text


def test_sentencepiece_bos_is_added_unless_the_file_says_no(sentencepiece_bpe, llama_like):
    bare = sentencepiece_bpe.encode("Hello")
    assert llama_like.encode("Hello") == [sentencepiece_bpe.bos_id(), *bare]
    silent = as_tokenizer(sentencepiece_vocabulary(sentencepiece_bpe, add_bos_token=False))
    assert silent.encode("Hello") == bare


def test_spelled_bytes_are_text_and_byte_tokens_are_bytes(sentencepiece_bpe, llama_like):
    assert llama_like.decode(llama_like.encode("<0xEA>")) == "<0xEA>"
    byte_ids = [sentencepiece_bpe.piece_to_id(f"<0x{byte:02X}>") for byte in "한".encode()]
    assert llama_like.decode(byte_ids) == "한"
    assert llama_like.token_bytes(byte_ids[0]) == b"\xed"


def test_no_space_before_the_text_when_the_file_says_so(sentencepiece_bpe):
    tokenizer = as_tokenizer(sentencepiece_vocabulary(sentencepiece_bpe, add_space_prefix=False))
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    assert tokenizer.decode(ids) == "Hello world"
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"
    assert ids[0] != sentencepiece_bpe.encode("Hello world")[0]


def test_sentencepiece_ids_equal_transformers(sentencepiece_bpe, llama_like):
    """transformers takes one space less from text that begins with spaces; sentencepiece decides there."""
    transformers = pytest.importorskip("transformers")
    vocabulary = sentencepiece_vocabulary(sentencepiece_bpe)
    oracle = transformers.LlamaTokenizer(
        vocab={token: i for i, token in enumerate(vocabulary.tokens)},
        merges=merges_from_scores(vocabulary),
        add_bos_token=True,
    )
    for text in texts():
        if not text.startswith(" ") and "<" not in text:
            assert llama_like.encode(text) == oracle.encode(text), text


def test_opening_costs_little(smollm2_path):
    """Start-up is a feature: the best of a few runs, so that a busy machine does not matter."""
    checkpoint = open_checkpoint(smollm2_path)
    seconds = []
    for _ in range(3):
        start = perf_counter()
        load_tokenizer(checkpoint)
        seconds.append(perf_counter() - start)
    assert min(seconds) < 0.35


def test_vocabularies_are_left_as_they_are():
    vocabulary = byte_level_vocabulary()
    before = dataclasses.replace(vocabulary, tokens=list(vocabulary.tokens), merges=list(vocabulary.merges))
    build_tokenizer(vocabulary)
    assert vocabulary == before
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
