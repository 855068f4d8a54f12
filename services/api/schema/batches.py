"""Bodies and replies of files and batches, in OpenAI's form. Pure."""

from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta
from starlette.datastructures import QueryParams

from services.api.batches.reading import Problem
from services.api.batches.records import Batch, File
from services.api.errors import invalid
from services.api.schema.generation import ABSENT
from services.api.schema.parse import Body

WINDOW_S = 24 * 3600
Id = Annotated[str, Meta(min_length=1, max_length=64)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class FileObject(msgspec.Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileDeleted(msgspec.Struct, frozen=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    input_file_id: Id
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[Problem]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class Listed(Protocol):
    @property
    def id(self) -> str | None: ...


Item = TypeVar("Item", bound=Listed)


class FileList(msgspec.Struct, frozen=True):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class BatchList(msgspec.Struct, frozen=True):
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


BATCH = Body(BatchRequest, {"output_expires_after": ABSENT})
PROBLEMS = msgspec.json.Decoder(list[Problem])


def file_object(file: File) -> FileObject:
    return FileObject(file.id, file.bytes, file.created, file.filename, file.purpose, file.expires)


def batch_object(batch: Batch) -> BatchObject:
    when: dict[str, int] = msgspec.json.decode(batch.changed)
    problems = PROBLEMS.decode(batch.errors)
    metadata: dict[str, str] | None = msgspec.json.decode(batch.metadata)
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=BatchErrors(problems) if problems else None,
        input_file_id=batch.input,
        status="finalizing" if batch.status == "expiring" else batch.status,
        output_file_id=batch.output,
        error_file_id=batch.failures,
        created_at=batch.created,
        in_progress_at=when.get("in_progress"),
        expires_at=batch.expires,
        finalizing_at=when.get("expiring", when.get("completed")),
        completed_at=when.get("completed"),
        failed_at=when.get("failed"),
        expired_at=when.get("expired"),
        cancelling_at=when.get("cancelling"),
        cancelled_at=when.get("cancelled"),
        request_counts=RequestCounts(batch.total, batch.done, batch.failed),
        metadata=metadata,
    )


class Page(Generic[Item]):
    """The part of a list that `limit`, `after` and `order` ask for. `items`: oldest first. Raises Reject."""

    def __init__(self, items: list[Item], query: QueryParams, most: int) -> None:
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order must be asc or desc", "order")
        given = query.get("limit", str(min(most, 20) if most <= 100 else most))
        if not (given.isascii() and given.isdigit() and len(given) <= 5 and 1 <= int(given) <= most):
            raise invalid(f"limit must be a whole number from 1 to {most}", "limit")
        rows: list[Item] = items if order == "asc" else items[::-1]
        if (after := query.get("after")) is not None:
            places = [place for place, row in enumerate(rows) if row.id == after]
            if not places:
                raise invalid("after names nothing in this list", "after")
            rows = rows[places[0] + 1 :]
        self.rows: list[Item] = rows[: int(given)]
        self.has_more = len(rows) > len(self.rows)

    def fields(self) -> dict[str, Any]:
        ids = [row.id for row in self.rows]
        first, last = (ids[0], ids[-1]) if ids else (None, None)
        return {"data": self.rows, "first_id": first, "last_id": last, "has_more": self.has_more}
