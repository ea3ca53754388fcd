"""Outputs belong to their language, in the core with a byte tokenizer and random weights, and with SmolLM2."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams, StructuredOutput
from engine.llm import LLM
from tests.engine.core_runs import add, finish, make_core, random_prompts
from tests.engine.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny

pytest.importorskip("xgrammar")

from engine.structured.language import bits_of, forbid, unpacked

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}


def is_person(text: str) -> bool:
    person = json.loads(text)
    assert list(person) in (["name", "age"], ["name", "age", "tags"]), person
    return (
        len(person["name"]) <= 8
        and type(person["age"]) is int
        and 0 <= person["age"] <= 150
        and len(person.get("tags", [])) <= 2
        and set(person.get("tags", [])) <= {"a", "b"}
    )


KINDS = {
    "json_object": (StructuredOutput("json_object"), lambda text: isinstance(json.loads(text), dict)),
    "json_schema": (StructuredOutput("json_schema", json.dumps(PERSON)), is_person),
    "regex": (
        StructuredOutput("regex", r"[A-Z][a-z]{2,8} \d{2}(\.5)?"),
        re.compile(r"[A-Z][a-z]{2,8} \d{2}(\.5)?").fullmatch,
    ),
    "choice": (
        StructuredOutput("choice", '["yes", "yes!", "\\"né\\\\", "a\\nb"]'),
        {"yes", "yes!", '"né\\', "a\nb"}.__contains__,
    ),
    "grammar": (StructuredOutput("grammar", 'root ::= "(" root ")" | [a-c]'), re.compile(r"(\(*)[a-c](\)*)").fullmatch),
    "structural_tag": (
        StructuredOutput(
            "structural_tag",
            json.dumps(
                {
                    "format": {
                        "type": "sequence",
                        "elements": [
                            {"type": "const_string", "value": "<a>"},
                            {"type": "json_schema", "json_schema": {"type": "boolean"}},
                            {"type": "regex", "pattern": "x{1,3}"},
                        ],
                    }
                }
            ),
        ),
        re.compile(r"<a>(true|false)x{1,3}").fullmatch,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path)
    return path


@pytest.fixture(scope="module")
def core(folder):
    return make_core(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from engine.checkpoints import open_checkpoint
    from engine.text.tokenizer import load_tokenizer

    return load_tokenizer(open_checkpoint(folder))


@pytest.fixture(scope="module")
def llm(smollm2_path):
    return LLM(str(smollm2_path), dtype="float32", kv_cache_tokens=4096, max_num_seqs=16)


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


CLOSING = {'"': 5.0, "}": 5.0, ")": 1.0}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_random_weights_belong_to_the_language(core, tokenizer, kind, temperature):
    structured, belongs = KINDS[kind]
    bias = {ids_of(tokenizer, text)[0]: value for text, value in CLOSING.items()}
    for index, prompt in enumerate(random_prompts(20)):
        params = SamplingParams(
            structured=structured, temperature=temperature, seed=index, max_tokens=200, logit_bias=bias
        )
        add(core, str(index), prompt, params, eos_token_ids=(EOS_TOKEN_ID,))
    outputs = finish(core)
    complete = [output for output in outputs.values() if output.finish_reason in ("complete", "stop")]
    assert len(complete) == 20 or (
        temperature == 0 and {o.finish_reason for o in outputs.values()} <= {"complete", "stop", "length"}
    )
    for output in complete:
        text = tokenizer.decode(output.new_token_ids)
        assert belongs(text), text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_smollm2_belong_to_the_language(llm, kind):
    structured, belongs = KINDS[kind]
    params = [
        SamplingParams(structured=structured, temperature=temperature, seed=seed, max_tokens=100)
        for seed, temperature in enumerate([0.0, 1.0, 1.0])
    ]
    chat = [{"role": "user", "content": "Describe Bob, who is 42."}]
    for request in llm.chat([chat] * len(params), params):
        [output] = request.outputs
        assert output.finish_reason == "stop" or (
            kind in ("json_object", "grammar") and output.finish_reason == "length"
        )
        assert output.finish_reason == "length" or belongs(output.text), output.text


def test_rows_beside_structured_ones_are_as_alone(core):
    prompts = random_prompts(9, seed=3)
    kinds = [None, *(structured for structured, _ in KINDS.values()), None, None]
    params = [
        SamplingParams(
            structured=structured,
            temperature=index % 2,
            seed=index,
            max_tokens=30,
            logprobs=2,
            presence_penalty=0.5 * (index % 3),
        )
        for index, structured in enumerate(kinds)
    ]
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        add(core, str(index), prompt, each, eos_token_ids=(EOS_TOKEN_ID,))
    together = finish(core)
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        add(core, str(index), prompt, each, eos_token_ids=(EOS_TOKEN_ID,))
        alone = finish(core)[str(index)]
        assert alone.new_token_ids == together[str(index)].new_token_ids
        for own, shared in zip(alone.logprobs, together[str(index)].logprobs, strict=True):
            assert own.logprob == pytest.approx(shared.logprob, abs=1e-4)


def test_a_preempted_output_goes_on_in_its_language(folder, core, tokenizer):
    structured = StructuredOutput("regex", "([a-z]{3}-)*[0-9]{40}!")
    params = [SamplingParams(structured=structured, seed=seed, max_tokens=60) for seed in range(6)]
    prompts = random_prompts(6, lengths=(30, 40), seed=5)
    small = make_core(folder, kv_cache_tokens=256, max_num_seqs=6)
    results = []
    for each in (core, small):
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            add(each, str(index), prompt, own)
        preemptions = 0
        outputs = []
        while each.has_work:
            outputs += each.step()
            preemptions += sum(request.timeline.num_preemptions for request in each.scheduler.waiting)
        results.append(
            {index: [t for o in outputs if o.request_id == index for t in o.new_token_ids] for index in "012345"}
        )
    assert preemptions > 0
    assert results[0] == results[1]
    for token_ids in results[0].values():
        assert re.fullmatch("([a-z]{3}-)*([a-z]{0,3}|[0-9]{0,39}|[0-9]{40}!)", tokenizer.decode(token_ids))


@pytest.mark.parametrize("vocab_size", [64, 75])
def test_forbid_leaves_other_rows_and_allowed_tokens(vocab_size):
    import torch

    class Some:
        def __init__(self, ids):
            self.allowed = ~bits_of(set(range(vocab_size)) - set(ids), vocab_size)

    logits = torch.randn(4, vocab_size)
    before = logits.clone()
    forbid(logits, [(1, Some([0, 31, 32, 63])), (3, Some([5]))])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for row, ids in ((1, [0, 31, 32, 63]), (3, [5])):
        assert torch.equal(logits[row, ids], before[row, ids])
        assert torch.isneginf(logits[row]).sum() == vocab_size - len(ids)


def test_unpacked_bits_are_those_of_numpy():
    import torch

    words = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 5), np.int32)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    assert unpacked(torch.from_numpy(words)).numpy().tolist() == bits.astype(bool).tolist()


def one(core, structured, prompt=(5, 6, 7), eos=(EOS_TOKEN_ID,), **params):
    add(
        core,
        "x",
        list(prompt),
        SamplingParams(structured=structured, **{"max_tokens": 20, "seed": 1} | params),
        eos_token_ids=eos,
    )
    return finish(core)["x"]


YES = StructuredOutput("choice", '["yes"]')


@pytest.mark.parametrize(
    ("params", "eos"),
    [
        ({}, (EOS_TOKEN_ID,)),
        ({"ignore_eos": True}, (EOS_TOKEN_ID,)),
        ({}, ()),
        ({"min_tokens": 10}, (EOS_TOKEN_ID,)),
        ({"max_tokens": 3}, (EOS_TOKEN_ID,)),
    ],
)
def test_a_complete_output_ends_at_once(core, tokenizer, params, eos):
    output = one(core, YES, eos=eos, **params)
    assert (tokenizer.decode(output.new_token_ids), output.finish_reason) == ("yes", "complete")


def test_ids_that_end_the_request_come_only_where_the_output_belongs(core, tokenizer):
    digits = StructuredOutput("regex", "[0-9]{3,}")
    bang = ids_of(tokenizer, "!")[0]
    bias = {EOS_TOKEN_ID: 100.0, bang: 100.0}
    output = one(core, digits, logit_bias=bias)
    assert (output.finish_reason, output.stop_reason, len(output.new_token_ids)) == ("stop", None, 4)
    output = one(core, digits, logit_bias=bias, ignore_eos=True, stop_token_ids=(bang,))
    assert (output.finish_reason, output.stop_reason, len(output.new_token_ids)) == ("stop", bang, 4)
    output = one(core, digits, logit_bias=bias, ignore_eos=True)
    assert (output.finish_reason, len(output.new_token_ids)) == ("length", 20)
    output = one(core, digits, logit_bias=bias, min_tokens=7)
    assert (output.finish_reason, len(output.new_token_ids)) == ("stop", 8)


def test_other_constraints_join_and_contradictions_fail(core, tokenizer):
    digits = StructuredOutput("regex", "[0-9]{4}")
    ones = ids_of(tokenizer, "1") * 4
    assert one(core, digits, allowed_token_ids=(ones[0], *ids_of(tokenizer, "a"))).new_token_ids == ones
    for params in ({"allowed_token_ids": (50,)}, {"bad_token_ids": tuple(ids_of(tokenizer, "0123456789"))}):
        output = one(core, digits, **params)
        assert (output.finish_reason, output.new_token_ids) == ("error", [])
        assert (output.error_type, output.error_param) == ("InvalidRequest", "structured")
        assert "no token is allowed" in output.error
    assert one(core, digits).finish_reason == "complete"


def test_logprobs_are_those_of_the_raw_distribution(core):
    free = one(core, None, logprobs=1, temperature=0)
    bound = one(core, YES, logprobs=1, temperature=0)
    assert free.logprobs[0].top == bound.logprobs[0].top
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob


def test_the_api_side_never_imports_xgrammar():
    code = "import engine.async_engine, server.app, sys; sys.exit(bool({'xgrammar', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_llm_raises_nothing_and_names_the_reason(llm):
    params = SamplingParams(structured=StructuredOutput("regex", "(a"), max_tokens=5)
    [request] = llm.generate("x", params)
    [output] = request.outputs
    assert output.finish_reason == "error"
    assert "parenthesis" in output.error


def test_bad_ids_in_sequences_are_refused():
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(bad_sequences=((1, VOCAB_SIZE),)).check_token_ids(VOCAB_SIZE)
    assert caught.value.param == "bad_sequences"
    with pytest.raises(InvalidRequest):
        SamplingParams(bad_sequences=((),))
