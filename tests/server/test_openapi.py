"""The OpenAPI document is valid and complete, and the server keeps what it says: thousands of drawn requests."""

import json
import re
import threading
from collections import Counter
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import positive_data_acceptance

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams
from configs.settings import ServerConfig
from server.app import create_app
from server.sampling import SamplingFields
from tests.server.conftest import MODEL
from tests.server.fake_engine import FakeEngine

APP = create_app(FakeEngine(), ServerConfig(), MODEL)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
DOCUMENT: dict[str, Any] = SCHEMA.raw_schema
OPERATIONS = {result.ok().label: result.ok() for result in SCHEMA.get_all_operations()}
WITH_BODY = [label for label, operation in OPERATIONS.items() if "requestBody" in operation.definition.raw]
QUICK, LONG = 16, 400
"""Requests of each kind for each operation."""

BEYOND_A_SCHEMA = re.compile(
    r"needs? |not JSON|must be used with|at least (n,|1; got 0)|contradict|exclude|mixes |is empty|empty list"
    r"|may hold one|knows no |names no |no meaning in"
    r"|may hold \d+|context length|at most max_tokens|does not exist|is stored|give text_1|has the id"
    r"|holds one text|a request may have|dimensions must be|is not supported by this|must be (sizes|auto|json)"
    r"|vocabulary|token ids between|maximum context length|no function call before|(messages|input)\[\d+\]"
)
"""What the document does not say: fields that depend on each other, on the model, on what is stored; parts of items."""


def drawn(label: str, mode: GenerationMode, count: int) -> Counter[int]:
    """Statuses of `count` drawn requests, all of which were answered as the document says."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    def answers(case: Case) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = with_plain_integers(case.body)
        elif is_valid_body(label, case.body):
            return
        response = case.call()
        case.validate_response(response, excluded_checks=[positive_data_acceptance])
        check_lines(label, response.headers["content-type"][0], response.text)
        if mode is GenerationMode.POSITIVE and response.status_code == 400 and count == LONG:
            assert BEYOND_A_SCHEMA.search(response.text), response.text
        statuses[response.status_code] += 1

    answers()
    return statuses


def is_valid_body(label: str, body: Any) -> bool:
    """What schemathesis makes wrong in one branch of a union may be right in another."""
    request = OPERATIONS[label].definition.raw.get("requestBody")
    if request is None or not isinstance(body, dict):
        return False
    schema = request["content"]["application/json"]["schema"]
    return bool(jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).is_valid(body))


def with_plain_integers(value: Any) -> Any:
    """JSON Schema takes 1.0 for an integer, this server does not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [with_plain_integers(one) for one in value]
    if isinstance(value, dict):
        return {name: with_plain_integers(one) for name, one in value.items()}
    return value


def check_lines(label: str, content_type: str, text: str) -> None:
    """Objects in lines are, line by line, what the document says; schemathesis looks into JSON and events alone."""
    if not content_type.startswith("application/x-ndjson"):
        return
    schema = OPERATIONS[label].definition.raw["responses"]["200"]["content"]["application/x-ndjson"]["schema"]
    validator = jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
    for line in text.splitlines():
        validator.validate(json.loads(line))


def test_the_document_is_valid() -> None:
    SCHEMA.validate()
    assert DOCUMENT["openapi"].startswith("3.1")
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert "__" not in name, "two classes of one name"
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


NUMBERS = {
    name: kinds[0]
    for name, described in SamplingFields.model_json_schema()["properties"].items()
    if (kinds := described.get("anyOf")) and kinds[0].get("type") in ("integer", "number") and len(kinds[0]) > 1
}


@pytest.mark.parametrize(("field", "bounds"), NUMBERS.items())
def test_ranges_are_those_that_sampling_params_checks(field: str, bounds: dict[str, Any]) -> None:
    if field == "length_penalty":
        return
    bounds = {name: bound for name, bound in bounds.items() if name != "type" and bound != 2**63}

    def takes(value: float) -> bool:
        try:
            SamplingParams(**{"max_tokens": None, field: value})
        except InvalidRequest as error:
            return error.param != field
        return True

    outside = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0, "exclusiveMaximum": 0}
    for name, bound in bounds.items():
        assert takes(bound) is not name.startswith("exclusive")
        assert not takes(bound + outside[name])
    if "exclusiveMinimum" in bounds:
        assert takes(bounds["exclusiveMinimum"] + 1e-9)
    if "maximum" not in bounds:
        assert takes(2**40)


def test_refused_fields_are_described_with_what_they_may_hold() -> None:
    properties = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    text = {"type": "array", "items": {"const": "text"}, "minItems": 1, "maxItems": 1}
    assert properties["modalities"]["anyOf"] == [{"type": "null"}, text]
    assert properties["temperature"]["description"] == "0 is greedy."
    assert properties["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0}


@pytest.mark.parametrize(
    ("event", "is_valid"),
    [
        ({"type": "ping"}, True),
        ({"type": "message_start"}, False),
        ({"type": "content_block_stop", "index": 0}, True),
        ({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}, True),
        ({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "text": "a"}}, False),
    ],
)
def test_events_of_messages_are_described_by_type(event: dict[str, Any], is_valid: bool) -> None:
    described = DOCUMENT["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    schema = described["properties"]["data"]["anyOf"][0]["contentSchema"]
    validator = jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
    assert validator.is_valid(event) is is_valid


def test_what_needs_a_key_says_so() -> None:
    document = create_app(FakeEngine(), ServerConfig(api_key=("k",)), MODEL).openapi()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]
    assert "securitySchemes" not in DOCUMENT["components"]


async def test_the_document_is_not_made_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = []
    monkeypatch.setattr(APP, "openapi", lambda: makers.append(threading.current_thread()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://test") as client:
        assert (await client.get("/openapi.json")).status_code == 200
    assert threading.current_thread() not in makers
    assert len(makers) == 1


@pytest.mark.parametrize("label", WITH_BODY)
def test_drawn_requests(label: str) -> None:
    assert set(drawn(label, GenerationMode.POSITIVE, QUICK)) <= {200, 400, 404, 408}
    refused = drawn(label, GenerationMode.NEGATIVE, QUICK)
    assert set(refused) <= {400, 404}


@pytest.mark.parametrize("label", sorted(set(OPERATIONS) - set(WITH_BODY)))
def test_drawn_requests_without_body(label: str) -> None:
    drawn(label, GenerationMode.POSITIVE, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("label", WITH_BODY)
def test_many_drawn_requests(label: str) -> None:
    assert drawn(label, GenerationMode.POSITIVE, LONG)[200] >= LONG / 40
    drawn(label, GenerationMode.NEGATIVE, LONG)
