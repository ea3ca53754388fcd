"""Small vocabularies of both kinds, trained on a few sentences."""

import io
import json

import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from engine.checkpoints import GGUFVocabulary
from engine.text.gguf_vocab import build_tokenizer
from engine.text.tokenizer import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "She sells sea shells by the sea shore; the shells she sells are surely sea shells.",
    "In 1984 the committee met 12 times. It decided nothing (as usual).",
    "Les élèves déjà arrivés étaient à l'heure — où sont les autres ?",
    "A tokenizer cuts text into tokens; a detokenizer puts the text together again.",
    "def add(first, second):\n    return first + second\n",
    "Hello world! Hello there, world. What a day it has been today.",
]

CORPUS_TEXTS = [
    "",
    " ",
    "a",
    "  two leading spaces",
    "trailing space ",
    "Hello world!",
    "The sea shells, the dog and the fox.",
    "tabs\tand\nnewlines\r\n\r\n\n end",
    "déjà vu, élève",
    "de\u0301ja\u0300",
    "日本語のテキスト、漢字",
    "한국어 문장",
    "😀 family 👨‍👩‍👧‍👦 flag 🇫🇷",
    "ภาษาไทย",
    "for i in range(10):\n        print(i ** 2)",
    "3.14159 and 1,000,000 and 2024-01-31",
    "<0xEA> is literal text",
    "it's we're I'll DON'T",
    "'manual' , it 's",
    "a" * 50,
    "x     y          z",
    "\u00a0non\u2003breaking\u200bzero",
    "ÀÉÎÕÜ ßæœ ŁŃ",
    "$%^&*() [] {} <> // \\ ~`",
]


def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    """BPE with byte fallback, text taken as it is, one space put before it: Llama's own settings."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_vocabulary(model: sentencepiece.SentencePieceProcessor, **changes: object) -> GGUFVocabulary:
    """The model as a GGUF file states it."""
    ids = range(model.get_piece_size())

    def kind(token_id: int) -> int:
        if model.is_unknown(token_id):
            return 2
        return 3 if model.is_control(token_id) else 6 if model.is_byte(token_id) else 1

    fields: dict[str, object] = {
        "model": "llama",
        "pre": "default",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_types": [kind(i) for i in ids],
        "merges": [],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unk_token_id": model.unk_id(),
        "pad_token_id": None,
        "add_bos_token": None,
        "add_eos_token": None,
        "add_space_prefix": None,
    }
    return GGUFVocabulary(**(fields | changes))  # type: ignore[arg-type]


def byte_level_vocabulary(**changes: object) -> GGUFVocabulary:
    """A GPT-2-like vocabulary with the control tokens <|start|> and <|end|> and the user-defined <think>."""
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    added = ["<|start|>", "<|end|>", "<think>"]
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    merges = json.loads(backend.to_str())["model"]["merges"]
    fields: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens + added,
        "scores": [],
        "token_types": [1] * len(tokens) + [3, 3, 4],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
        "unk_token_id": None,
        "pad_token_id": None,
        "add_bos_token": None,
        "add_eos_token": None,
        "add_space_prefix": None,
    }
    return GGUFVocabulary(**(fields | changes))  # type: ignore[arg-type]


def as_tokenizer(vocabulary: GGUFVocabulary) -> Tokenizer:
    names = {"bos_token": vocabulary.bos_token_id, "eos_token": vocabulary.eos_token_id}
    return Tokenizer(
        build_tokenizer(vocabulary), {name: vocabulary.tokens[i] for name, i in names.items() if i is not None}
    )
