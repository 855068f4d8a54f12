"""Nothing is decided by the wall clock: it jumps, and every deadline with it.

Who shows a time of day to people or clients is named here; all else reads a monotonic clock.
"""

import ast

import pytest

from tests.arch.rules import parsed

WALL = {("time", "time"), ("time", "time_ns"), ("time", "localtime"), ("time", "gmtime"), ("time", "ctime")}
WALL |= {("datetime", "now"), ("datetime", "today"), ("datetime", "utcnow"), ("date", "today")}
SHOWN = {
    ("common/crash.py", "Reporter.write"): "when a process died, for people",
    ("common/recorder.py", "Recorder.beat"): "times of events, for people",
    ("common/recorder.py", "Ring.add"): "the same",
    ("common/tracing.py", "Spans.tell"): "times of spans, for collectors",
    ("common/lifecycle.py", "Process.__init__"): "since when a process runs, for the status",
    ("services/worker/build_locks.py", "clean"): "ages of lock files, whose times are the file system's",
    ("services/api/generate.py", "generate"): "`created` of an answer",
    ("services/api/batches/files.py", "Files.place"): "`created_at`; files outlive processes and their clocks",
    ("services/api/batches/files.py", "Files.sweep"): "the same, and ages of files, whose times are the file system's",
    ("services/api/batches/work.py", "Work.expire"): "batches outlive processes and their clocks",
    ("services/api/batches/work.py", "Work._become"): "times of a batch, for clients",
    ("services/api/endpoints/batches.py", "create_batch"): "`created_at` of a batch",
    ("services/scheduler/process_kv_events.py", "Publisher._send"): "times of batches, for subscribers",
    ("services/api/endpoints/responses.py", "create_response"): "`created_at` of a response",
    ("services/api/response_events.py", "ResponseEvents.end"): "`completed_at`",
    ("services/api/batches/responses.py", "Responses.sweep"): "kept responses outlive processes and their clocks",
    ("services/tokenizer/chat.py", "_now"): "chat templates may tell the model the date",
}


def wall_clocks(name: str, tree: ast.Module) -> list[tuple[str, str]]:
    """(file, qualified function) of every use of a wall clock, also one that is only imported."""
    found: list[tuple[str, str]] = []

    def visit(node: ast.AST, where: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where = (*where, node.name)
        if isinstance(node, ast.Attribute) and (_last(node.value), node.attr) in WALL:
            found.append((name, ".".join(where)))
        if isinstance(node, ast.ImportFrom):
            found.extend((name, ".".join(where)) for alias in node.names if (node.module, alias.name) in WALL)
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(tree, ())
    return found


def _last(node: ast.expr) -> str:
    """`datetime` of `datetime` and of `datetime.datetime`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_services_decide_by_monotonic_clocks() -> None:
    found = {use for name, tree, _ in parsed("common", "services") for use in wall_clocks(name, tree)}
    assert found == set(SHOWN)


@pytest.mark.parametrize(
    "code",
    [
        "import time\ndeadline_s = time.time() + 5",
        "import time\nclock = time.time",
        "from time import time",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime\ndatetime.utcnow()",
        "from datetime import date\ndate.today()",
        "import time\ntime.time_ns()",
    ],
)
def test_a_wall_clock_is_found(code: str) -> None:
    assert wall_clocks("services/x.py", ast.parse(code))


def test_a_monotonic_clock_is_none() -> None:
    code = "import time\ntime.monotonic(), time.perf_counter(), time.sleep(1)"
    assert wall_clocks("services/x.py", ast.parse(code)) == []
