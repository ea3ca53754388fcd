"""Joined deltas equal the text of the whole, and stop strings end it at the right character and token."""

from itertools import pairwise
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import as_tokenizer, byte_level_vocabulary, sentencepiece_model, sentencepiece_vocabulary

from configs.sampling import Reasoning, SamplingParams
from engine.messages import TokenOutput
from engine.output_processor import OutputProcessor
from engine.outputs import RequestOutput

BYTE_LEVEL = as_tokenizer(byte_level_vocabulary())
SENTENCEPIECE = as_tokenizer(sentencepiece_vocabulary(sentencepiece_model()))
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
BYTE_IDS = {value: i for i in range(474) if len(value := BYTE_LEVEL.token_bytes(i)) == 1}
IDS = st.lists(st.integers(0, 480), max_size=30)


def ids_of(text, tokenizer=BYTE_LEVEL):
    return tokenizer.encode(text, add_special_tokens=False)


def single_bytes(text):
    """One token per byte."""
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


def push(processor: OutputProcessor, ids, finish_reason=None) -> RequestOutput:
    return processor.process(TokenOutput(request_id="r", new_token_ids=list(ids), finish_reason=finish_reason))


def stream(tokenizer, ids, *, prompt=(), finish_reason="length", **params):
    """Deltas of one token per push, up to the end of the request."""
    processor = OutputProcessor(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    deltas = []
    for i, token_id in enumerate(ids):
        last = i == len(ids) - 1
        deltas.append(push(processor, [token_id], finish_reason if last else None))
        if deltas[-1].stop_reason:
            break
    return deltas


def joined(deltas):
    return "".join(delta.text for delta in deltas)


@BOTH
@given(ids=IDS, skip=st.booleans())
def test_any_ids_stream_to_the_whole_text(tokenizer, ids, skip):
    deltas = stream(tokenizer, ids, skip_special_tokens=skip)
    assert joined(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@BOTH
@given(prompt=IDS, ids=IDS, skip=st.booleans())
def test_deltas_continue_the_prompt(tokenizer, prompt, ids, skip):
    """What an unfinished character at the end of the prompt becomes is the output's."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip).rstrip("\ufffd")
    text = joined(stream(tokenizer, ids, prompt=prompt, skip_special_tokens=skip))
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    assert whole.startswith(before)
    assert text.lstrip("\ufffd") == whole[len(before) :].lstrip("\ufffd")


@BOTH
@given(text=st.text(max_size=30))
def test_valid_text_never_shows_a_replacement_character(tokenizer, text):
    text = text.replace("\ufffd", "").replace("\u2581", "")  # SentencePiece writes spaces as the latter
    deltas = stream(tokenizer, ids_of(text, tokenizer), skip_special_tokens=False)
    assert joined(deltas) == text
    assert "\ufffd" not in joined(deltas)


@given(ids=IDS, cuts=st.sets(st.integers(0, 30)), stop=st.sampled_from([(), ("e", "th"), (" the",)]))
def test_several_tokens_at_once_change_nothing(ids, cuts, stop):
    processor = OutputProcessor(BYTE_LEVEL, [], SamplingParams(stop=stop, max_tokens=None))
    borders = [0, *sorted(cut for cut in cuts if 0 < cut < len(ids)), len(ids)]
    deltas = []
    for start, end in pairwise(borders):
        deltas.append(push(processor, ids[start:end], "length" if end == len(ids) else None))
        if deltas[-1].stop_reason:
            break
    alone = stream(BYTE_LEVEL, ids, stop=stop)
    assert joined(deltas) == joined(alone)
    assert sum(len(delta.token_ids) for delta in deltas) == sum(len(delta.token_ids) for delta in alone)


def test_characters_leave_whole():
    deltas = stream(BYTE_LEVEL, single_bytes("é😀!"))
    assert [delta.text for delta in deltas] == ["", "é", "", "", "", "😀", "!"]


def test_an_unfinished_character_at_the_end_is_replaced():
    assert joined(stream(BYTE_LEVEL, single_bytes("a😀")[:-1])) == "a\ufffd"


def test_a_character_that_the_prompt_began_is_completed():
    ids = single_bytes("é")
    assert joined(stream(BYTE_LEVEL, ids[1:], prompt=ids[:1])) == "é"


def test_sentencepiece_keeps_the_space_between_prompt_and_output():
    prompt, output = SENTENCEPIECE.encode("Hello"), ids_of("world", SENTENCEPIECE)
    assert joined(stream(SENTENCEPIECE, output, prompt=prompt)) == " world"
    only_bos = prompt[:1]
    assert joined(stream(SENTENCEPIECE, output, prompt=only_bos)) == "world"
    assert joined(stream(SENTENCEPIECE, output, prompt=only_bos, skip_special_tokens=False)) == " world"


def test_special_tokens_are_hidden_or_shown():
    ids = [*ids_of("a"), BYTE_LEVEL.eos_token_id, *ids_of("b")]
    assert joined(stream(BYTE_LEVEL, ids)) == "ab"
    shown = stream(BYTE_LEVEL, ids, skip_special_tokens=False)
    assert joined(shown) == "a<|end|>b"
    assert sum(len(delta.token_ids) for delta in shown) == 3


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_token_borders(include):
    deltas = stream(BYTE_LEVEL, single_bytes("one STOP two"), stop=("STOP",), include_stop_str_in_output=include)
    assert joined(deltas) == ("one STOP" if include else "one ")
    assert deltas[-1].stop_reason == "STOP"
    assert sum(len(delta.token_ids) for delta in deltas) == len("one STOP")


def test_a_stop_string_inside_a_token():
    ids = ids_of("The sea shells.")
    [position] = [i for i, token_id in enumerate(ids) if b"shell" in BYTE_LEVEL.token_bytes(token_id)]
    processor = OutputProcessor(BYTE_LEVEL, [], SamplingParams(stop=("she",)))
    output = push(processor, ids)
    assert (output.text, output.finish_reason, output.stop_reason) == ("The sea ", "stop", "she")
    assert output.token_ids == ids[: position + 1], "tokens behind it count for nothing"
    assert output.num_output_tokens == position + 1


def test_a_stop_string_in_the_last_token_is_reported():
    output = stream(BYTE_LEVEL, single_bytes("abc"), stop=("c",))[-1]
    assert (output.text, len(output.token_ids), output.stop_reason) == ("", 1, "c")


def test_text_that_waits_leaves_at_the_end():
    deltas = stream(BYTE_LEVEL, single_bytes("abEN"), stop=("END",))
    assert [delta.text for delta in deltas] == ["a", "b", "", "EN"]


def test_min_tokens_holds_stop_strings_off():
    ids = single_bytes("a.b.c.d")
    assert joined(stream(BYTE_LEVEL, ids, stop=(".",), min_tokens=4)) == "a.b"
    assert joined(stream(BYTE_LEVEL, ids, stop=(".",), min_tokens=5)) == "a.b.c"
    assert joined(stream(BYTE_LEVEL, ids, stop=(".",), min_tokens=7)) == "a.b.c.d"
    assert joined(stream(BYTE_LEVEL, ids, stop=(".b.",), min_tokens=4)) == "a", "only its end counts"


@pytest.mark.parametrize(("include", "expected"), [(False, "ab"), (True, "abc")])
def test_the_stop_token_is_left_out_unless_asked_for(include, expected):
    deltas = stream(BYTE_LEVEL, single_bytes("abc"), finish_reason="stop", include_stop_str_in_output=include)
    assert joined(deltas) == expected
    assert sum(len(delta.token_ids) for delta in deltas) == 3


def test_the_end_of_sequence_token_stays_hidden_as_a_special_token():
    ids = [*ids_of("a"), BYTE_LEVEL.eos_token_id]
    assert joined(stream(BYTE_LEVEL, ids, finish_reason="stop", include_stop_str_in_output=True)) == "a"


def test_a_request_that_ends_without_a_token_gives_what_waits():
    processor = OutputProcessor(BYTE_LEVEL, [], SamplingParams(stop=("END",)))
    assert push(processor, single_bytes("xEN")).text == "x"
    output = push(processor, [], "timeout")
    assert (output.text, output.token_ids, output.finish_reason) == ("EN", [], "timeout")


def test_cost_per_token_is_flat():
    params = SamplingParams(stop=("<|never|>", "abcdefgh", "\n\n\n\n\n", "Human:"), max_tokens=None)
    ids = ids_of("The quick brown fox jumps over the lazy dog. ")
    processor = OutputProcessor(BYTE_LEVEL, [], params)
    seconds = []
    for _ in range(20):
        start = process_time()
        for i in range(400):
            push(processor, [ids[i % len(ids)]])
        seconds.append(process_time() - start)
    assert min(seconds[10:]) < 4 * min(seconds[:10])  # 11 times where a token costs what came before it


END = BYTE_LEVEL.special_id("<|end|>")


@pytest.mark.parametrize("finish_reason", ["length", "stop"])  # the core ends at the token, or does not know it
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_spells_a_special_token_counts_at_that_token(include, finish_reason):
    options = {"stop": ("<|end|>",), "include_stop_str_in_output": include}
    ids = [*ids_of("The dog"), END, *(ids_of(" barks") if finish_reason == "length" else [])]
    deltas = stream(BYTE_LEVEL, ids, finish_reason=finish_reason, **options)
    assert joined(deltas) == ("The dog<|end|>" if include else "The dog")
    assert deltas[-1].stop_reason == "<|end|>"
    assert sum(len(delta.token_ids) for delta in deltas) == len(ids_of("The dog")) + 1


@pytest.mark.parametrize(
    ("stop", "text", "expected", "found"),
    [
        ("\n<|end|>", "The\n dog\n", "The\n dog", True),
        ("\n<|end|>", "The dog", "The dog", False),
        ("<|end|>", "", "", True),
        ("<|end|>\n", "The dog", "The dog", False),
        ("end|>", "The dog", "The dog", False),  # a part of a token that texts leave out is no text
        ("|", "The dog", "The dog", False),
    ],
)
def test_stop_strings_beside_special_tokens(stop, text, expected, found):
    deltas = stream(BYTE_LEVEL, [*ids_of(text), END], stop=(stop, "no such text"), finish_reason="stop")
    assert (joined(deltas), deltas[-1].stop_reason) == (expected, stop if found else None)


def test_a_stop_string_that_spells_a_special_token_counts_as_text_too():
    for ids in (single_bytes("The dog<|end|> barks"), ids_of("The dog<|end|> barks")):
        for skip in (True, False):
            deltas = stream(BYTE_LEVEL, ids, stop=("<|end|>",), skip_special_tokens=skip)
            assert (joined(deltas), deltas[-1].stop_reason) == ("The dog", "<|end|>")


def test_min_tokens_holds_off_special_tokens_too():
    ids = [END, *ids_of("a"), END, *ids_of("b"), END]
    deltas = stream(BYTE_LEVEL, ids, stop=("<|end|>",), min_tokens=4)
    assert joined(deltas) == "ab"
    assert deltas[-1].stop_reason == "<|end|>"


@pytest.mark.parametrize("opening", ["", "<think>"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a dog</think>a dog b", "<think>a dog</think>a "),
        ("\n<think>dog\n</think>\n\nab\n\ncd", "\n<think>dog\n</think>\n\nab"),
        ("<think>dog", "<think>dog"),
        ("<think></think></think>dog", "<think></think></think>"),
    ],
)
def test_stop_strings_do_not_count_in_the_reasoning_part(text, expected, opening):
    if not opening:
        text, expected = (each.replace("<think>", "", 1) for each in (text, expected))
    for ids in (single_bytes(text), ids_of(text)):
        deltas = stream(BYTE_LEVEL, ids, stop=("dog", "\n\n"), reasoning=Reasoning("</think>", opening))
        assert joined(deltas) == expected
        assert bool(deltas[-1].stop_reason) == (expected != text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("\n\n", ""), (" dog", " "), ("<thin dog", "<thin "), ("a <think>dog", "a <think>"), ("<think", "<think")],
)
def test_without_a_reasoning_part_all_is_content(text, expected):
    for ids in (single_bytes(text), ids_of(text)):
        deltas = stream(BYTE_LEVEL, ids, stop=("dog", "\n\n"), reasoning=Reasoning("</think>", "<think>"))
        assert joined(deltas) == expected
        assert bool(deltas[-1].stop_reason) == (expected != text)


def test_a_special_token_stops_the_reasoning_too():
    ids = [*ids_of("a dog"), END, *ids_of(" barks")]
    deltas = stream(BYTE_LEVEL, ids, stop=("dog", "<|end|>"), reasoning=Reasoning("</think>"))
    assert (joined(deltas), deltas[-1].stop_reason) == ("a dog", "<|end|>")
