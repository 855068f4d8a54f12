from starlette.datastructures import QueryParams

from services.api.batches.records import Batch, File
from services.api.schema.batches import Page, batch_object, file_object

BATCH = Batch(
    "b",
    "me",
    "/v1/completions",
    "f",
    '{"k":"v"}',
    10,
    20,
    "expiring",
    '{"in_progress":11,"expiring":20}',
    total=3,
    done=1,
)


def test_a_batch_as_clients_see_it() -> None:
    shown = batch_object(BATCH)
    assert (shown.status, shown.in_progress_at, shown.finalizing_at, shown.expired_at) == ("finalizing", 11, 20, None)
    assert (shown.metadata, shown.errors, shown.request_counts.completed) == ({"k": "v"}, None, 1)
    failed = batch_object(BATCH._replace(status="failed", errors='[{"code":"empty_file","message":"m","line":null}]'))
    assert failed.errors is not None and failed.errors.data[0].code == "empty_file" and failed.status == "failed"


def test_pages_follow_each_other() -> None:
    items = [file_object(File(f"f{number}", "me", "n", "batch", 1, number)) for number in range(5)]
    seen: list[str] = []
    more, after = True, {}
    while more:
        page = Page(items, QueryParams({"limit": "2", **after}), 100).fields()
        seen += [row.id for row in page["data"]]
        more, after = page["has_more"], {"after": page["last_id"]}
    assert seen == ["f4", "f3", "f2", "f1", "f0"]
    assert Page([], QueryParams({}), 100).fields() == {"data": [], "first_id": None, "last_id": None, "has_more": False}
