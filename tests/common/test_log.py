import json
import logging
import subprocess
import sys

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


def test_the_level_that_an_administrator_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("api-0", "info", "text")
    for level, shown in (("debug", True), ("", True), ("loud", True), ("error", False)):
        log.follow(level)
        capsys.readouterr()
        logging.getLogger("x").debug("detail")
        assert ("detail" in capsys.readouterr().err) == shown


SECRET = "the-secret-words"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001
        return caught


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("kind", [KeyError, ValueError, TypeError, LookupError, Exception, BaseException, UnicodeError])
def test_texts_of_exceptions_that_may_quote_a_request_are_left_out(
    capsys: pytest.CaptureFixture[str], kind: type[BaseException], form: str
) -> None:
    log.set_up("api-0", "debug", form)
    logging.getLogger("x").error("failed", exc_info=raised(kind(SECRET), raised(ValueError(SECRET))))
    text = capsys.readouterr().err
    assert SECRET not in text
    assert kind.__name__ in text and "test_log.py" in text and "which led to" in text


@pytest.mark.parametrize("error", [AssertionError("slot 3"), RuntimeError("given up"), OSError(28, "disk full")])
def test_our_own_words_stay(capsys: pytest.CaptureFixture[str], error: BaseException) -> None:
    log.set_up("api-0", "info", "text")
    logging.getLogger("x").error("failed", exc_info=raised(error))
    assert str(error) in capsys.readouterr().err


def test_what_nobody_caught_is_told_in_the_same_way() -> None:
    code = f"""
import sys, threading
from common import log
log.set_up("api-0", "info", "text")
def fail(): raise KeyError({SECRET!r}.upper())
thread = threading.Thread(target=fail, name="side")
thread.start(); thread.join()
class Late:
    def __del__(self): fail()
    def __repr__(self): return {SECRET!r}.upper()
Late()
fail()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert SECRET.upper() not in done.stderr
    assert done.stderr.count("KeyError (its text") == 3 and "nobody caught this in side" in done.stderr


def test_the_loops_words_without_its_values() -> None:
    message = f"Exception in callback partial(<function f>, '{SECRET}')"
    assert log.words_of({"message": message}) == "Exception in callback partial"
    assert log.words_of({"message": "Task exception was never retrieved"}) == "Task exception was never retrieved"
    assert log.words_of({}) == ""
    chained = RuntimeError("x")
    chained.__cause__ = chained
    assert log.describe(chained).count("RuntimeError") == 1
