"""What holds for every style: pieces sum up to the whole, nothing is lost, nothing waits without reason."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.answers.delta import Answer, DeltaMessage
from server.answers.parser import AnswerParser
from server.answers.styles import REASONING_PARSERS, THINK, TOOL_STYLES, ReasoningParser, ToolStyle, style_of

FUNCTIONS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}, "g": {}}
FRAGMENTS = [
    *(marker for style in TOOL_STYLES.values() for marker in style.markers),
    *(marker for style in REASONING_PARSERS for marker in style),
    *"{}[]()<>\"'\\:=,; \n\tax",
    *(
        "f",
        "g",
        "f(",
        "f(a=",
        "unknown",
        '"name"',
        '"arguments"',
        '"parameters": ',
        '{"name": "f", ',
        "null",
        "-1.5",
        "é",
    ),
    *('{"name": "f", "arguments": {"a": "b"}}', '{"name": "g"}', '{"arguments": {}, "name": "g"}', "g()", '"""', "\\n"),
    *("<function=f>\n", "<parameter=a>\n", "</parameter>\n", "</function>", "[ARGS]", "[CALL_ID]", "tool", "\x00"),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
tool_styles = st.sampled_from([None, *TOOL_STYLES.values()])
reasoning_styles = st.sampled_from([None, *REASONING_PARSERS])


def parser(reasoning: ReasoningParser | None, tools: ToolStyle | None, *, starts_inside: bool = False) -> AnswerParser:
    numbers = itertools.count()
    style = tools and tools._replace(make_id=lambda: f"id{next(numbers)}")
    return AnswerParser(reasoning, style, FUNCTIONS, starts_inside=starts_inside)


def joined(deltas: list[DeltaMessage]) -> Answer:
    answer = Answer()
    for delta in deltas:
        answer.add(delta)
    return answer


def stream(parser: AnswerParser, pieces: list[str], *, cut: bool = False) -> list[DeltaMessage]:
    return [*(parser.push(piece) for piece in pieces), parser.push("", ended=True, cut=cut)]


@given(texts, reasoning_styles, tool_styles, st.booleans(), st.booleans(), st.data())
def test_pieces_sum_up_to_the_whole(
    text: str, reasoning: ReasoningParser | None, tools: ToolStyle | None, inside: bool, cut: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    whole = parser(reasoning, tools, starts_inside=inside).parse(text, cut=cut)
    for split in (pieces, list(text)):
        assert joined(stream(parser(reasoning, tools, starts_inside=inside), split, cut=cut)) == whole


@given(texts, tool_styles)
def test_without_calls_the_content_is_the_text(text: str, tools: ToolStyle | None) -> None:
    answer = parser(None, tools).parse(text)
    if not answer.tool_calls:
        assert answer.content == text


@given(texts, tool_styles)
def test_each_call_has_its_index_id_and_name_once_and_first(text: str, tools: ToolStyle | None) -> None:
    seen: list[str] = []
    answers = parser(None, tools)
    for delta in stream(answers, list(text)):
        for piece in delta.tool_calls:
            if piece.id is None:
                assert piece.name is None
                assert piece.arguments
                assert piece.index == len(seen) - 1
            else:
                assert piece.name
                assert piece.index == len(seen)
                seen.append(piece.id)
    assert len(set(seen)) == len(seen) == answers.num_calls


@given(tool_styles, reasoning_styles, st.booleans())
def test_text_without_markers_passes_at_once(
    tools: ToolStyle | None, reasoning: ReasoningParser | None, inside: bool
) -> None:
    answers = parser(reasoning, tools, starts_inside=inside and reasoning is not None)
    for piece in ("Two", " words", " and a stop.", "a < b", " é", "tail"):
        delta = answers.push(piece)
        assert delta.reasoning + delta.content == piece


@pytest.mark.parametrize("style", [style for style in TOOL_STYLES.values() if "<tool_call>" in style.markers])
def test_only_the_beginning_of_a_marker_waits(style: ToolStyle) -> None:
    answers = parser(None, style)
    assert answers.push("so <tool").content == "so "
    assert answers.push("_c").content == ""
    assert answers.push("ups>").content == "<tool_cups>"


def test_answers_of_nothing_but_white_space_are_kept() -> None:
    assert parser(None, TOOL_STYLES["hermes"]).parse(" \n ").content == " \n "


@pytest.mark.parametrize("style", TOOL_STYLES.values(), ids=TOOL_STYLES)
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        ("", "word "),
        ("", "\n"),
        ("", '<tool_call>{"name":"f","id":['),
        ('<tool_call>{"name":[', '<tool_call>{"name":['),
        ('<tool_call>{"name":"f","arguments":{"a":"', "word "),
        ('<tool_call>{"arguments":{"a":"', "word "),
        ("[f(a='", "word "),
        ("[", "["),
        ("{", "{"),
    ],
)
def test_a_piece_costs_the_same_after_a_long_text(style: ToolStyle, begin: str, piece: str) -> None:
    answers = parser(None, style)
    answers.push(begin)

    def cost() -> float:
        """The cheapest of several runs, in seconds."""
        times = []
        for _ in range(6):
            start = time.process_time()
            for _ in range(50):
                answers.push(piece)
            times.append(time.process_time() - start)
        return min(times)

    early = cost()
    for _ in range(8000):
        answers.push(piece)
    assert cost() < 5 * early + 0.001


THINKING = [
    ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
    ("<think>why</think>so", False, "why", "so"),
    ("<think>\n\n</think>\n\nso", False, "", "so"),
    ("\n <think>why\n\nnot</think>\n    code", False, "why\n\nnot", "    code"),
    ("why\n</think>\nso </think> <think>", True, "why", "so </think> <think>"),
    ("<think>\nwhy</think>so", True, "why", "so"),
    ("why < thin </thin \n\n", True, "why < thin </thin ", ""),
    ("no marker </think>", False, "", "no marker </think>"),
    ("later <think>why</think>", False, "", "later <think>why</think>"),
    ("", True, "", ""),
    ("</think>so", True, "", "so"),
]


@pytest.mark.parametrize("style", REASONING_PARSERS, ids=lambda style: style.opening)
@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), THINKING)
def test_reasoning_and_content_lose_the_line_breaks_at_the_markers(
    style: ReasoningParser, text: str, inside: bool, reasoning: str, content: str
) -> None:
    def spelled(text: str) -> str:
        return text.replace("<think>", style.opening).replace("</think>", style.closing)

    answer = parser(style, None, starts_inside=inside).parse(spelled(text))
    assert (answer.reasoning, answer.content) == (spelled(reasoning), spelled(content))


def test_reasoning_streams_up_to_its_line_breaks() -> None:
    answers = parser(THINK, None)
    pieces = ["<thi", "nk>", "\n", "one", "\n", "two <", "/think", ">", "\n", "so"]
    deltas = stream(answers, pieces)
    assert [delta.reasoning for delta in deltas] == ["", "", "", "one", "", "\ntwo ", "", "", "", "", ""]
    assert [delta.content for delta in deltas] == [*[""] * 9, "so", ""]


def test_calls_may_follow_reasoning_and_reasoning_holds_none() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    answer = parser(THINK, TOOL_STYLES["hermes"]).parse(f"<think>\nmaybe {call}\n</think>\n\n{call}")
    assert answer.reasoning == f"maybe {call}"
    assert answer.content == ""
    assert [(called.name, called.arguments) for called in answer.tool_calls] == [("f", "{}")]


@pytest.mark.parametrize(
    ("prompt", "inside", "over"),
    [
        ("<|im_start|>assistant\n<think>\n", True, False),
        ("<|im_start|>assistant\n<think>", True, False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, True),
        ("what is <think>?<|im_start|>assistant\n", False, False),
    ],
)
def test_the_prompt_tells_whether_reasoning_is_open_or_over(prompt: str, inside: bool, over: bool) -> None:
    assert THINK.starts_inside(prompt) == inside
    assert THINK.is_over(prompt) == over


def test_the_closing_marker_in_a_template_tells_the_style() -> None:
    for style in REASONING_PARSERS:
        template = (
            "{% if '" + style.closing + "' in content %}{{ content.split('" + style.closing + "')[-1] }}{% endif %}"
        )
        assert style_of(template).reasoning is style
    assert style_of("{{ messages[0].content }}<think>").reasoning is None
