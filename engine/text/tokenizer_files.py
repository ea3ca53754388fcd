"""The tokenizer of a Hugging Face folder: tokenizer.json, with what tokenizer_config.json adds to it."""

from typing import Any

from tokenizers import AddedToken, Tokenizer

from configs.errors import CheckpointError
from engine.checkpoints.checkpoint import TokenizerFiles
from engine.checkpoints.hf_folder import read_json

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_tokenizer(files: TokenizerFiles, num_embeddings: int) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and the special tokens by name (`bos_token`, …).

    tokenizer.json states what surrounds a text; `add_bos_token` in tokenizer_config.json, which transformers 5
    passes over as well, is for tokenizers without such a file. Tokens for which the model's `num_embeddings` leave no
    room are left out. Raises CheckpointError when a file is missing or cannot be read.
    """
    file = files.folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{files.folder}: no tokenizer.json; transformers writes one: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise CheckpointError(f"{file}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = {**read_json(files.folder / "special_tokens_map.json", missing_ok=True), **files.tokenizer_config}
    try:
        named = {name: token for name in SPECIAL_NAMES if (token := _content(config.get(name)))}
        _add_tokens(tokenizer, _added_tokens(tokenizer, config, named), num_embeddings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{files.folder}/tokenizer_config.json: its tokens cannot be read ({error})") from None
    return tokenizer, named


def _content(entry: Any) -> str | None:
    """A token's text: tokenizer_config.json holds plain strings and serialised `AddedToken`s."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(text, str | None):
        raise TypeError(f"{type(text).__name__} for a text")
    return text


def _added_tokens(tokenizer: Tokenizer, config: dict[str, Any], named: dict[str, str]) -> list[AddedToken]:
    """The tokens that tokenizer_config.json calls added or special, in the order of their ids."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    if isinstance(extra, dict):
        extra = extra.values()
    entries = [*(config[name] for name in named), *extra]
    special = {text: entry for entry in entries if (text := _content(entry))}
    declared = config.get("added_tokens_decoder") or {}
    added = {
        entry["content"]: _added_token(entry, special=entry.get("special", False) or entry["content"] in special)
        for _, entry in sorted(declared.items(), key=lambda item: int(item[0]))
    }
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    others = [_added_token(entry, special=True) for text, entry in special.items() if text not in added.keys() | known]
    return [*added.values(), *others]


def _added_token(entry: Any, *, special: bool) -> AddedToken:
    flags = entry if isinstance(entry, dict) else {}
    given = {name: flags[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in flags}
    return AddedToken(_content(entry), special=special, **given)


def _add_tokens(tokenizer: Tokenizer, added: list[AddedToken], num_embeddings: int) -> None:
    """A token without an id gets the next one, as in transformers."""
    ids = tokenizer.get_added_tokens_decoder()
    room = num_embeddings - max(
        tokenizer.get_vocab_size(with_added_tokens=False), *(token_id + 1 for token_id in ids), 0
    )
    new = [token.content for token in added if tokenizer.token_to_id(token.content) is None]
    without_room = set(new[max(room, 0) :])
    tokenizer.add_tokens([token for token in added if token.content not in without_room])
