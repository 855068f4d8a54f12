import json
import logging

import pytest

from common import log


@pytest.fixture(autouse=True)
def _keep_root_logger():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_lines_carry_process_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("api-0", "info", "json")
    log.RequestLogger(logging.getLogger("x"), "req-7").info("accepted %d", 3)
    logging.getLogger("x").debug("not shown")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["message"], line["process"], line["request_id"]) for line in lines] == [
        ("accepted 3", "api-0", "req-7")
    ]


def test_text_lines_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("worker-0", "warning", "text")
    logging.getLogger("x").warning("slow")
    log.RequestLogger(logging.getLogger("x"), "r1").error("ended")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("WARNING worker-0 slow")
    assert second.endswith("ERROR   worker-0 [req r1] ended")
