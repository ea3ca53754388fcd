"""A GGUF file's vocabulary as a `tokenizers.Tokenizer`.

The file names its pre-tokenizer (`tokenizer.ggml.pre`) without spelling it out; `PRE_TOKENIZERS` holds, by that
name, what the tokenizer.json of the family says. A name that is not there is refused, since a guess would feed
the model tokens that it has not learned from.
"""

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from configs.errors import CheckpointError
from engine.checkpoints.gguf_vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, GGUFVocabulary

from .token_spelling import SPACE_MARK


@dataclass(frozen=True)
class PreTokenizer:
    """What happens to text before byte-level BPE."""

    split: str | None = None
    """Regular expression whose matches are pieces; None is GPT-2's own, built into ByteLevel."""
    further: tuple[str, ...] = ()
    """Regular expressions that cut those pieces, one after the other."""
    single_digits: bool = False
    """Every digit is a piece, before `split`."""
    nfc: bool = False
    """Unicode normalisation form C first."""
    ignore_merges: bool = False
    """A piece that is a token is taken whole."""
    add_bos: bool = False
    """Used where the file does not say."""


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(suffix: str = "") -> str:
    """Words that a change from lower to upper case ends."""
    return "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{stem}{suffix}" for stem in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))


_GPT2 = PreTokenizer()
_SINGLE_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3_SPLIT = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_LLAMA3 = PreTokenizer(_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}", nfc=True)
_TEKKEN = PreTokenizer(rf"{_cased_words()}|\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}", ignore_merges=True, add_bos=True)
_GPT4O = PreTokenizer(rf"{_cased_words(_CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS_SLASH}|{_SPACES}")
_QWEN35 = PreTokenizer(
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    nfc=True,
)
_DEEPSEEK_CODER = PreTokenizer(
    r"[\r\n]", (r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"), add_bos=True
)

PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "phi-2", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(_LLAMA3_SPLIT)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    "deepseek-coder": _DEEPSEEK_CODER,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}


def build_tokenizer(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Raises CheckpointError for an unknown model or pre-tokenizer, or a vocabulary that contradicts itself."""
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if vocabulary.model not in builders:
        supported = ", ".join(sorted(builders))
        raise CheckpointError(f"tokenizer.ggml.model {vocabulary.model!r} is not supported; supported are {supported}")
    _check(vocabulary)
    try:
        tokenizer, add_bos = builders[vocabulary.model](vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception
        raise CheckpointError(f"the GGUF vocabulary cannot be used: {error}") from error
    _keep_whole(tokenizer, vocabulary)
    if vocabulary.add_bos_token is not None:
        add_bos = vocabulary.add_bos_token
    wanted = ((add_bos, vocabulary.bos_token_id), (vocabulary.add_eos_token, vocabulary.eos_token_id))
    bos, eos = (vocabulary.tokens[token_id] if add and token_id is not None else None for add, token_id in wanted)
    tokenizer.post_processor = _surround(tokenizer, bos, eos)
    return tokenizer


def _check(vocabulary: GGUFVocabulary) -> None:
    size = len(vocabulary.tokens)
    lengths = {"token_type": len(vocabulary.token_types)}
    if vocabulary.model == "llama":
        lengths["scores"] = len(vocabulary.scores)
    for name, length in lengths.items():
        if length != size:
            raise CheckpointError(f"tokenizer.ggml.{name} has {length} entries for {size} tokens")
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
        token_id = getattr(vocabulary, name)
        if token_id is not None and not 0 <= token_id < size:
            raise CheckpointError(f"the GGUF vocabulary's {name} is {token_id}, but it has {size} tokens")


def _surround(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    """Post-processor that puts these tokens, where given, before and after the text."""
    return processors.TemplateProcessing(
        single=[*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {bos, eos} if token],
    )


def _byte_level(vocabulary: GGUFVocabulary) -> tuple[Tokenizer, bool]:
    pre = PRE_TOKENIZERS.get(vocabulary.pre)
    if pre is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre {vocabulary.pre!r} is not supported; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    tokenizer = Tokenizer(BPE(_token_ids(vocabulary), merges, ignore_merges=pre.ignore_merges))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps += [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in pre.further]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(vocabulary: GGUFVocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE without text normalisation, and one space before the text unless the file says no."""
    unk = None if vocabulary.unk_token_id is None else vocabulary.tokens[vocabulary.unk_token_id]
    model = BPE(
        _token_ids(vocabulary),
        merges_from_scores(vocabulary),
        unk_token=unk,
        fuse_unk=True,
        byte_fallback=BYTE in vocabulary.token_types,
    )
    tokenizer = Tokenizer(model)
    add_space = vocabulary.add_space_prefix is not False
    spaces = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if add_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(content=" ", left=1, right=0)] if add_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def merges_from_scores(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE vocabulary, best first.

    SentencePiece joins the adjacent pair whose union has the highest score (`bpe_model.cc`), so each way to cut a
    token into two tokens is a merge, ranked by the token's score. Control, unknown and byte tokens never come
    out of text.
    """
    textual = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.token_types, strict=True)
        if kind not in (UNKNOWN, CONTROL, BYTE)
    }
    merges = []
    for token in sorted(textual, key=lambda token: -textual[token]):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in textual and right in textual:
                merges.append((left, right))
    return merges


def _token_ids(vocabulary: GGUFVocabulary) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(vocabulary.tokens)}


def _keep_whole(tokenizer: Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Control and user-defined tokens are found in text before anything splits it; control tokens are special."""
    of_kind: dict[int, list[AddedToken]] = {CONTROL: [], USER_DEFINED: []}
    for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True):
        if kind in of_kind and token:
            of_kind[kind].append(AddedToken(token, normalized=False, special=kind == CONTROL))
    tokenizer.add_special_tokens(of_kind[CONTROL])
    tokenizer.add_tokens(of_kind[USER_DEFINED])
