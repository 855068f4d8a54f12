"""What the database of files and batches gives back. Values only; columns and fields have one order."""

from typing import NamedTuple


class File(NamedTuple):
    id: str
    owner: str  # name of the API key, or nothing where none is needed
    filename: str
    purpose: str
    bytes: int
    created: int  # Unix time
    expires: int | None = None


class Batch(NamedTuple):
    """`status`: OpenAI's, and "expiring", in which the files of one whose time is over are written."""

    id: str
    owner: str
    endpoint: str
    input: str  # id of a file, which may be deleted by now
    metadata: str  # JSON
    created: int
    expires: int
    status: str
    changed: str = "{}"  # JSON: by status, when it came
    errors: str = "[]"  # JSON: what is wrong with the input
    output: str | None = None
    failures: str | None = None
    worker: int | None = None  # signed incarnation of the replica that reads its input or writes its files
    total: int = 0
    done: int = 0
    failed: int = 0


class Response(NamedTuple):
    """A response that is kept. What it was asked for is kept until there is an answer, if nobody waits for that."""

    id: str
    owner: str
    created: int
    status: str
    previous: str | None
    input: str  # JSON: items
    body: str  # JSON: the response object
    request: bytes | None = None  # JSON: of one in the background, until it has ended
    worker: int | None = None  # signed incarnation of the replica that computes it
    bytes: int = 0


class Line(NamedTuple):
    """One request that a replica has taken to answer it; of no batch: a response in the background, `custom`."""

    batch: str
    line: int
    custom: str
    endpoint: str
    owner: str
    body: bytes
