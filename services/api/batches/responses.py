"""Responses of /v1/responses that are kept, and those in the background, which replicas compute like lines of batches.

One in the background belongs to nobody, or to the replica whose incarnation stands beside it, or it has ended. Each
API key sees its own. What is kept is bounded by number, bytes and age: the oldest that have ended go.
"""

import time
from collections.abc import Iterable

import msgspec

from services.api.batches.database import Database, signed
from services.api.batches.records import Line, Response

ENDPOINT = "/v1/responses"
OPEN = ("queued", "in_progress")
KEPT = ("id", "created_at", "background", "store", "previous_response_id")  # from the object that the client knows
FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
ANSWER_BYTES = 4096  # that one may at least grow by


class Responses:
    """`own`: this replica's incarnation."""

    def __init__(self, database: Database, own: int) -> None:
        self._database, self._own = database, signed(own)

    def add(self, response: Response, most_open: int, most: int, most_bytes: int) -> bool:
        """False if its owner has so many in the background already."""
        owner = response.owner
        size = len(response.input) + len(response.body) + len(response.request or b"") + ANSWER_BYTES
        with self._database.writing() as run:
            if response.status in OPEN:
                query = "SELECT COUNT(*) FROM responses WHERE owner = ? AND status IN (?, ?)"
                if run.execute(query, (owner, *OPEN)).fetchone()[0] >= most_open:
                    return False
            marks = ", ".join("?" * len(response))
            run.execute(f"INSERT INTO responses VALUES ({marks})", response._replace(bytes=size))
            query = "SELECT COUNT(*), SUM(bytes) FROM responses WHERE owner = ?"
            count, total = run.execute(query, (owner,)).fetchone()
            oldest = """SELECT id, bytes FROM responses WHERE owner = ? AND id != ? AND status NOT IN (?, ?)
                ORDER BY created, rowid LIMIT 100"""
            while count > most or total > most_bytes:
                rows = run.execute(oldest, (owner, response.id, *OPEN)).fetchall()
                if not rows:
                    break
                for row in rows:
                    if count > most or total > most_bytes:
                        run.execute("DELETE FROM responses WHERE id = ?", (row["id"],))
                        count, total = count - 1, total - row["bytes"]
        return True

    def find(self, identity: str, owner: str) -> Response | None:
        query = "SELECT * FROM responses WHERE id = ? AND owner = ?"
        row = self._database.run.execute(query, (identity, owner)).fetchone()
        return None if row is None else Response(**row)

    def chain(self, identity: str, owner: str, most: int) -> list[Response]:
        """That response behind all before it, at most `most`; the first one's `previous` tells whether some miss."""
        found: list[Response] = []
        name: str | None = identity
        while name is not None and len(found) < most and (response := self.find(name, owner)):
            found.append(response)
            name = response.previous
        return found[::-1]

    def delete(self, identity: str, owner: str) -> bool:
        """Whether there was one. If it is computed, that ends soon."""
        with self._database.writing() as run:
            return bool(run.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (identity, owner)).rowcount)

    def cancel(self, identity: str, owner: str) -> None:
        """One that has ended stays as it is."""
        with self._database.writing() as run:
            run.execute(
                """UPDATE responses SET status = 'cancelled', body = json_set(body, '$.status', 'cancelled'),
                request = NULL, worker = NULL WHERE id = ? AND owner = ? AND status IN (?, ?)""",
                (identity, owner, *OPEN),
            )

    def take(self, most: int) -> list[Line]:
        """Up to `most` that nobody has, the oldest first."""
        query = """SELECT id, owner, request FROM responses
            WHERE status IN ('queued', 'in_progress') AND worker IS NULL ORDER BY created, rowid LIMIT ?"""
        if not self._database.run.execute(query, (1,)).fetchall():
            return []  # mostly, and without a lock
        with self._database.writing() as run:
            rows = run.execute(query, (most,)).fetchall()
            run.executemany(
                """UPDATE responses SET worker = ?, status = 'in_progress',
                body = json_set(body, '$.status', 'in_progress') WHERE id = ?""",
                [(self._own, row["id"]) for row in rows],
            )
        return [Line("", 0, row["id"], ENDPOINT, row["owner"], row["request"]) for row in rows]

    def mine(self, names: Iterable[str]) -> set[str]:
        """Those of them that this replica still is to compute."""
        query = "SELECT 1 FROM responses WHERE id = ? AND worker = ?"
        run = self._database.run
        return {name for name in names if run.execute(query, (name, self._own)).fetchone()}

    def release(self, alive: Iterable[int]) -> int:
        """What others had who are not `alive` belongs to nobody again. Returns how many."""
        there = [self._own, *map(signed, alive)]
        gone = f"worker IS NOT NULL AND worker NOT IN ({', '.join('?' * len(there))})"
        with self._database.writing() as run:
            query = f"UPDATE responses SET worker = NULL WHERE status IN ('queued', 'in_progress') AND {gone}"
            return run.execute(query, there).rowcount

    def give_back(self, line: Line) -> None:
        """It could not be computed now."""
        with self._database.writing() as run:
            run.execute("UPDATE responses SET worker = NULL WHERE id = ? AND worker = ?", (line.custom, self._own))

    def answer(self, line: Line, good: bool, result: bytes) -> bool:
        """`result`: the response object, or an error's. False if it is not this replica's any more."""
        with self._database.writing() as run:
            query = "SELECT body FROM responses WHERE id = ? AND worker = ?"
            row = run.execute(query, (line.custom, self._own)).fetchone()
            if row is None:
                return False
            known = FIELDS.decode(row["body"])
            body = _good(known, result) if good else _failed(known, result)
            status = msgspec.json.decode(body["status"])
            text = msgspec.json.encode(body).decode()
            query = """UPDATE responses SET status = ?, body = ?, request = NULL, worker = NULL, bytes = bytes + ?
                WHERE id = ?"""
            run.execute(query, (status, text, len(text), line.custom))
        return True

    def sweep(self, age_s: float) -> None:
        """Deletes what is too old."""
        with self._database.writing() as run:
            query = "DELETE FROM responses WHERE created <= ? AND status NOT IN (?, ?)"
            run.execute(query, (time.time() - age_s, *OPEN))


def _good(known: dict[str, msgspec.Raw], result: bytes) -> dict[str, msgspec.Raw]:
    return FIELDS.decode(result) | {name: known[name] for name in KEPT}


def _failed(known: dict[str, msgspec.Raw], result: bytes) -> dict[str, msgspec.Raw]:
    problem = msgspec.json.decode(result)["error"]
    error = {"code": "server_error", "message": problem["message"]}
    if problem["type"] == "invalid_request_error":
        error["code"] = "invalid_prompt"
    return known | {"status": msgspec.Raw(b'"failed"'), "error": msgspec.Raw(msgspec.json.encode(error))}
