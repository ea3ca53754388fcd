"""Nothing of a stop string leaves, nothing else waits, and token borders do not matter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stop_strings import StopStringFilter

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def feed(stops, pieces, **options):
    """(text that left, the stop string, texts as they left)."""
    stop_filter = StopStringFilter(stops, **options)
    left = []
    for piece in pieces:
        text, stop = stop_filter.push(piece)
        left.append(text)
        if stop is not None:
            return "".join(left), stop, left
    left.append(stop_filter.finish())
    return "".join(left), None, left


def first_stop(stops, text):
    """The plain definition: the stop string that is complete first, and the longest of those."""
    for end in range(len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(matches, key=len)
    return None


@given(stops=STOPS, pieces=st.lists(LETTERS), include=st.booleans())
def test_equals_the_plain_definition_however_text_is_cut(stops, pieces, include):
    text = "".join(pieces)
    left, stop, _ = feed(stops, pieces, include_in_output=include)
    found = first_stop(stops, text)
    if found is None:
        assert (left, stop) == (text, None)
    else:
        end, expected = found
        assert (left, stop) == (text[: end if include else end - len(expected)], expected)


@given(stops=STOPS, pieces=st.lists(LETTERS))
def test_only_a_live_prefix_waits(stops, pieces):
    stop_filter = StopStringFilter(stops)
    text = left = ""
    for piece in pieces:
        text += piece
        new, stop = stop_filter.push(piece)
        left += new
        if stop is not None:
            break
        prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
        longest = max(len(prefix) for prefix in prefixes if text.endswith(prefix))
        assert len(text) - len(left) == longest


def test_text_of_another_letter_leaves_at_once():
    _, _, left = feed(("z" * 30,), ["Hello", " world"])
    assert left == ["Hello", " world", ""]


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (("END",), ["abE", "N", "D!"], ("ab", "END")),
        (("END",), ["abEN", "x"], ("abENx", None)),
        (("aab",), ["aa", "ab"], ("a", "aab")),
        (("abcd", "bc"), ["abcd"], ("a", "bc")),
        (("bc", "abc"), ["abcd"], ("", "abc")),
        (("\n\n",), ["one\n", "\ntwo"], ("one", "\n\n")),
        ((), ["anything"], ("anything", None)),
    ],
)
def test_cases(stops, pieces, expected):
    assert feed(stops, pieces)[:2] == expected


def test_matches_may_be_let_through():
    stop_filter = StopStringFilter(("aa",))
    assert stop_filter.push("xaa", may_match=False) == ("xa", None), "the last a may begin another"
    assert stop_filter.push("b", may_match=False) == ("ab", None)
    assert stop_filter.push("aa") == ("", "aa")


def test_a_match_may_begin_where_matches_are_let_through():
    stop_filter = StopStringFilter(("END",))
    assert stop_filter.push("abEN", may_match=False) == ("ab", None)
    assert stop_filter.push("D") == ("", "END")
