"""The budget of a reasoning part: the closing marker is forced when it is spent, and not before."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams, ThinkingBudget
from engine.llm import LLM
from engine.thinking import Thinking
from tests.engine.tiny_models import write_tiny

IDS = st.integers(1, 4)


def inside_and_over(output: list[int], budget: ThinkingBudget) -> tuple[int | None, bool]:
    """By the definition: tokens behind the opening marker (None before it), and whether the closing one came."""
    begin, end = list(budget.begin), list(budget.end)
    opened = next((i for i in range(len(begin), len(output) + 1) if output[i - len(begin) : i] == begin), None)
    if opened is None:
        return None, False
    over = any(output[i - len(end) : i] == end for i in range(max(opened + 1, len(end)), len(output) + 1))
    return len(output) - opened, over


@given(
    output=st.lists(IDS, max_size=12),
    begin=st.lists(IDS, max_size=2).map(tuple),
    end=st.lists(IDS, min_size=1, max_size=3).map(tuple),
    most=st.integers(0, 5),
)
def test_the_marker_is_forced_once_the_budget_is_spent(
    output: list[int], begin: tuple[int, ...], end: tuple[int, ...], most: int
) -> None:
    budget = ThinkingBudget(most, end, begin)
    thinking = Thinking(budget)
    for token_id in output:
        thinking.append(token_id)
    inside, over = inside_and_over(output, budget)
    if inside is None or over or inside < most:
        assert thinking.forced_id is None
        return
    for _ in end:  # what is forced completes the marker
        forced = thinking.forced_id
        assert forced is not None
        thinking.append(forced)
        output = [*output, forced]
        if inside_and_over(output, budget)[1]:
            break
    assert thinking.forced_id is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reasoning_ends_in_time(tmp_path: Path, temperature: float) -> None:
    write_tiny(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024, num_threads=1)
    end = tuple(llm.tokenizer.encode("</t>"))
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=30, ignore_eos=True, thinking=ThinkingBudget(7, end)
    )
    [request] = llm.generate("Hello", params)
    free = llm.generate("Hello", SamplingParams(temperature=temperature, seed=1, max_tokens=30, ignore_eos=True))[0]
    ids = request.outputs[0].token_ids
    assert ids[:7] == free.outputs[0].token_ids[:7]
    assert tuple(ids[7:11]) == end
    assert len(ids) == 30


@pytest.mark.parametrize("budget", [ThinkingBudget(-1, (1,)), ThinkingBudget(1, ())])
def test_budgets_that_cannot_be(budget: ThinkingBudget) -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(thinking=budget)
