"""A few cases of each operation of /openapi.json; `python -m tests.fuzz http_schema` runs more."""

from tests.fuzz import http_schema
from tests.fuzz.processes import running


def test_answers_are_what_the_document_says() -> None:
    cases = []
    with running("model.max_len=256") as system:
        statuses = http_schema.explore(system, 6, 1, lambda: cases.append(1))
        system.check()
        system.wait_idle()
    assert sum(statuses.values()) > 40
    assert {200, 400} <= statuses.keys()
