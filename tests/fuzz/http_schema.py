"""Every operation of /openapi.json with bodies that fit its schema and bodies that do not, by schemathesis.

The system is real but for its worker. Answers must be those that the document lists, with its schemas: no 5xx but 503
and 504, and every error in OpenAI's form, with the field's name where a field of the body is at fault.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.processes import Processes, running

CHECKS = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
PASSING = {503, 504}
LIMIT_S = 60
SLOW = ("/v1/chat/completions/batch", "/v1/messages", "/v1/messages/count_tokens")  # to make up: lists within lists


def check(case: Any, statuses: Counter[int]) -> None:
    """Sends one case. Raises AssertionError, or what schemathesis raises, if the answer is not what it should be."""
    response = case.call(timeout=LIMIT_S)
    statuses[response.status_code] += 1
    if response.status_code not in PASSING:
        case.validate_response(response, checks=[not_a_server_error, *CHECKS])
    if response.status_code == 400 and case.body is not None:
        error = response.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error", error
        if isinstance(case.body, dict) and "param" in error:  # Anthropic's form has none
            named = (error["param"] or "").partition("[")[0].partition(".")[0].lower()
            about_no_field = error["param"] is None and (
                "JSON" in error["message"] or "Expected `object`" in str(error)
            )
            assert named in case.body or named in error["message"].lower() or about_no_field, error


def takes_json(operation: Any) -> bool:
    """Only such a body can be wrong in interesting ways: a path takes any text, and a form is none of JSON's types."""
    return any(body.media_type == "application/json" for body in operation.body)


def explore(system: Processes, budget: int, first: int, advance: Callable[[], None]) -> Counter[int]:
    schema = schemathesis.openapi.from_url(f"{system.url}/openapi.json")
    statuses: Counter[int] = Counter()
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not takes_json(operation):
                continue

            few = budget // 6 + 1 if operation.path in SLOW else budget

            @seed(first)
            @settings(max_examples=few, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                advance()
                check(case, statuses)

            send()
    return statuses


def fuzz(budget: int, first: int, advance: Callable[[], None]) -> None:
    """`budget` cases of each operation, and as many that do not fit its schema."""
    with running("api.max_open_requests=100000", "model.max_len=256") as system:
        print(sorted(explore(system, budget, first, advance).items()))
        system.check()
        system.wait_idle()
