"""The tokenizer of a Hugging Face folder: tokenizer.json, with what tokenizer_config.json adds to it."""

from typing import Any

from tokenizers import AddedToken, Tokenizer

from configs.errors import CheckpointError
from engine.checkpoints.checkpoint import TokenizerFiles
from engine.checkpoints.hf_folder import read_json

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_tokenizer(files: TokenizerFiles) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and the special tokens by name (`bos_token`, …).

    tokenizer.json states what surrounds a text; `add_bos_token` in tokenizer_config.json, which transformers 5
    passes over as well, is for tokenizers without such a file.
    Raises CheckpointError when tokenizer.json is missing or cannot be read.
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
    named = {name: token for name in SPECIAL_NAMES if (token := _content(config.get(name)))}
    _add_tokens(tokenizer, config, named)
    return tokenizer, named


def _content(entry: Any) -> str | None:
    """A token's text: tokenizer_config.json holds plain strings and serialised `AddedToken`s."""
    return entry.get("content") if isinstance(entry, dict) else entry


def _add_tokens(tokenizer: Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json calls added or special.

    A token without an id in tokenizer.json is left out: the model has no embedding for it.
    """
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    if isinstance(extra, dict):
        extra = extra.values()
    special = {*named.values(), *(text for entry in extra if (text := _content(entry)))}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    added = {
        entry["content"]: AddedToken(
            entry["content"],
            special=entry.get("special", False) or entry["content"] in special,
            **{flag: entry[flag] for flag in flags if flag in entry},
        )
        for entry in config.get("added_tokens_decoder", {}).values()
    }
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    added |= {text: AddedToken(text, special=True, normalized=False) for text in special - added.keys() - known}
    present = [token for token in added.values() if tokenizer.token_to_id(token.content) is not None]
    tokenizer.add_special_tokens([token for token in present if token.special])
    tokenizer.add_tokens([token for token in present if not token.special])
