"""Batches, and what is left to do of them.

A line belongs to nobody, or to the replica whose incarnation stands beside it, or it has its result: there is one for
each line, whoever gave it. So does a batch while a replica reads its input or writes its files.
"""

import time
from collections.abc import Iterable, Iterator, Sequence

from services.api.batches.database import Database, signed
from services.api.batches.files import Files
from services.api.batches.records import Batch, File, Line

BEGUN = ("validating", "in_progress")
ENDS = {"in_progress": "completed", "cancelling": "cancelled", "expiring": "expired"}
# A batch of which nothing is left to do, or nothing shall be begun and nobody is at it.
FINISHED = """
    (status = 'in_progress' AND done + failed = total) OR (status IN ('cancelling', 'expiring') AND NOT EXISTS (
        SELECT 1 FROM lines WHERE batch = batches.id AND good IS NULL AND lines.worker IS NOT NULL))"""


class Work:
    """`own`: this replica's incarnation."""

    def __init__(self, database: Database, files: Files, own: int) -> None:
        self._database, self._files, self._own = database, files, signed(own)

    def add(self, batch: Batch, most_begun: int) -> bool:
        """False if its owner has so many already."""
        with self._database.writing() as run:
            query = "SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN (?, ?)"
            if run.execute(query, (batch.owner, *BEGUN)).fetchone()[0] >= most_begun:
                return False
            marks = ", ".join("?" * len(batch))
            run.execute(f"INSERT INTO batches ({', '.join(Batch._fields)}) VALUES ({marks})", batch)
        return True

    def find(self, identity: str, owner: str) -> Batch | None:
        query = "SELECT * FROM batches WHERE id = ? AND owner = ?"
        row = self._database.run.execute(query, (identity, owner)).fetchone()
        return None if row is None else Batch(**row)

    def of(self, owner: str) -> list[Batch]:
        """Oldest first."""
        rows = self._database.run.execute("SELECT * FROM batches WHERE owner = ? ORDER BY created, rowid", (owner,))
        return [Batch(**row) for row in rows]

    def begin(self, identity: str, lines: Iterable[tuple[int, str, bytes]]) -> None:
        """The lines of a batch whose input this replica reads; with an exception of `lines` it has none."""
        with self._database.writing() as run:
            rows = ((identity, number, custom, body) for number, custom, body in lines)
            total = run.executemany("INSERT INTO lines (batch, line, custom, body) VALUES (?, ?, ?, ?)", rows).rowcount
            run.execute("UPDATE batches SET total = ? WHERE id = ?", (total, identity))
            if not self._become(identity, ("validating",), "in_progress"):
                run.execute("DELETE FROM lines WHERE batch = ?", (identity,))  # cancelled meanwhile

    def fail(self, identity: str, errors: str) -> None:
        """Its input cannot be used. `errors`: JSON."""
        with self._database.writing() as run:
            if self._become(identity, ("validating",), "failed"):
                run.execute("UPDATE batches SET errors = ? WHERE id = ?", (errors, identity))

    def cancel(self, identity: str, owner: str) -> bool:
        """No line of it begins any more. False if it is not there, or is ending already."""
        with self._database.writing():
            return self.find(identity, owner) is not None and self._become(identity, BEGUN, "cancelling")

    def expire(self) -> None:
        """Those whose time is over are ended with what they have."""
        query = "SELECT id FROM batches WHERE status IN (?, ?) AND expires <= ?"
        for row in self._database.run.execute(query, (*BEGUN, time.time())).fetchall():
            with self._database.writing():
                self._become(row["id"], BEGUN, "expiring")

    def _become(self, identity: str, before: Sequence[str], status: str) -> bool:
        marks = ", ".join("?" * len(before))
        query = f"""UPDATE batches SET status = ?, worker = NULL, changed = json_set(changed, ?, ?)
            WHERE id = ? AND status IN ({marks})"""
        given = (status, f"$.{status}", int(time.time()), identity, *before)
        return bool(self._database.run.execute(query, given).rowcount)

    def release(self, alive: Iterable[int]) -> int:
        """What others had who are not `alive` belongs to nobody again. Returns how many lines."""
        there = [self._own, *map(signed, alive)]
        gone = f"worker IS NOT NULL AND worker NOT IN ({', '.join('?' * len(there))})"
        with self._database.writing() as run:
            run.execute(f"UPDATE batches SET worker = NULL WHERE {gone}", there)
            return run.execute(f"UPDATE lines SET worker = NULL WHERE good IS NULL AND {gone}", there).rowcount

    def take(self, most: int) -> list[Line]:
        """Up to `most` lines that nobody has, of the oldest batches first."""
        query = """SELECT l.batch, l.line, l.custom, b.endpoint, b.owner, l.body FROM batches b
            JOIN lines l ON l.batch = b.id AND l.worker IS NULL AND l.good IS NULL
            WHERE b.status = 'in_progress' ORDER BY b.created, b.rowid, l.line LIMIT ?"""
        with self._database.writing() as run:
            lines = [Line(*row) for row in run.execute(query, (most,))]
            rows = [(self._own, line.batch, line.line) for line in lines]
            run.executemany("UPDATE lines SET worker = ? WHERE batch = ? AND line = ?", rows)
        return lines

    def give_back(self, line: Line) -> None:
        """It could not be answered now."""
        query = "UPDATE lines SET worker = NULL WHERE batch = ? AND line = ? AND worker = ? AND good IS NULL"
        with self._database.writing() as run:
            run.execute(query, (line.batch, line.line, self._own))

    def answer(self, line: Line, good: bool, result: bytes) -> bool:
        """False if the line is not this replica's any more: whoever has it answers it."""
        query = """UPDATE lines SET good = ?, result = ?, body = X'', worker = NULL
            WHERE batch = ? AND line = ? AND worker = ? AND good IS NULL"""
        with self._database.writing() as run:
            kept = run.execute(query, (good, result, line.batch, line.line, self._own)).rowcount
            if kept:
                column = "done" if good else "failed"
                run.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (line.batch,))
        return bool(kept)

    def take_unread(self) -> Batch | None:
        """One whose input has to be read."""
        return self._take_batch("status = 'validating'")

    def take_finished(self) -> Batch | None:
        """One whose files have to be written."""
        return self._take_batch(FINISHED)

    def _take_batch(self, condition: str) -> Batch | None:
        query = f"SELECT * FROM batches WHERE worker IS NULL AND ({condition}) ORDER BY created, rowid LIMIT 1"
        with self._database.writing() as run:
            row = run.execute(query).fetchone()
            if row is None:
                return None
            run.execute("UPDATE batches SET worker = ? WHERE id = ?", (self._own, row["id"]))
        return Batch(**row)

    def results(self, identity: str, good: bool) -> Iterator[bytes]:
        """In the order of the input."""
        query = "SELECT result FROM lines WHERE batch = ? AND good = ? ORDER BY line"
        return (row[0] for row in self._database.run.execute(query, (identity, good)))

    def undone(self, identity: str) -> Iterator[str]:
        """Names of the lines without a result."""
        query = "SELECT custom FROM lines WHERE batch = ? AND good IS NULL ORDER BY line"
        return (row[0] for row in self._database.run.execute(query, (identity,)))

    def finish(self, batch: Batch, output: File | None, failures: File | None) -> None:
        """The end of a batch that this replica has taken. Both files are in their place; they are listed now."""
        files = [file for file in (output, failures) if file is not None]
        query = "UPDATE batches SET output = ?, failures = ? WHERE id = ? AND worker = ?"
        names = [None if file is None else file.id for file in (output, failures)]
        with self._database.writing() as run:
            mine = run.execute(query, (*names, batch.id, self._own)).rowcount
            if mine:
                run.executemany("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", files)
                self._become(batch.id, (batch.status,), ENDS[batch.status])
                run.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
        if not mine:
            for file in files:
                self._files.path(file.id).unlink(missing_ok=True)

    def begun(self) -> bool:
        """Whether anything is left to do."""
        query = "SELECT EXISTS (SELECT 1 FROM batches WHERE status IN (?, ?, ?, ?))"
        return bool(self._database.run.execute(query, (*BEGUN, "cancelling", "expiring")).fetchone()[0])
