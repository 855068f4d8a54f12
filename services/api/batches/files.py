"""Files of users: an entry in the database and the content in a folder, by a name of ours. One owner sees only his."""

import os
import secrets
import time
from pathlib import Path

from services.api.batches.database import Database
from services.api.batches.records import File

ABANDONED_S = 3600.0  # nobody writes a file for so long


class Files:
    def __init__(self, database: Database, root: Path) -> None:
        """Makes the folders. Raises OSError."""
        self._database, self._kept, self._arriving = database, root / "files", root / "arriving"
        for folder in (self._kept, self._arriving):
            folder.mkdir(mode=0o700, exist_ok=True)

    def arriving(self) -> Path:
        """Where what is not complete yet is written."""
        return self._arriving / secrets.token_hex(16)

    def path(self, identity: str) -> Path:
        """`identity` is that of an entry."""
        return self._kept / identity

    def place(self, arrived: Path, owner: str, filename: str, purpose: str, expires: int | None = None) -> File:
        """Moves the content in; there is no file before its entry is `listed`."""
        file = File(new_id("file"), owner, filename, purpose, arrived.stat().st_size, int(time.time()), expires)
        os.replace(arrived, self.path(file.id))
        return file

    def add(self, file: File) -> None:
        with self._database.writing() as run:
            run.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", file)

    def of(self, owner: str) -> list[File]:
        """Oldest first."""
        rows = self._database.run.execute("SELECT * FROM files WHERE owner = ? ORDER BY created, rowid", (owner,))
        return [File(**row) for row in rows]

    def find(self, identity: str, owner: str) -> File | None:
        query = "SELECT * FROM files WHERE id = ? AND owner = ?"
        row = self._database.run.execute(query, (identity, owner)).fetchone()
        return None if row is None else File(**row)

    def total_bytes(self) -> int:
        """Of all owners, with what is just arriving."""
        kept: int = self._database.run.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchone()[0]
        return kept + sum(found.st_size for path in self._arriving.iterdir() if (found := _stat(path)))

    def delete(self, identity: str, owner: str) -> bool:
        """Whether there was one. What a batch has read of it stays with the batch."""
        with self._database.writing() as run:
            gone = run.execute("DELETE FROM files WHERE id = ? AND owner = ?", (identity, owner)).rowcount
        if gone:
            self.path(identity).unlink(missing_ok=True)
        return bool(gone)

    def sweep(self) -> None:
        """Deletes what has expired, and content that died with the process that brought it."""
        now_s, query = time.time(), "SELECT id, owner FROM files WHERE expires <= ?"
        for row in self._database.run.execute(query, (now_s,)).fetchall():
            self.delete(*row)
        known = {row[0] for row in self._database.run.execute("SELECT id FROM files")}
        for path in (*self._kept.iterdir(), *self._arriving.iterdir()):
            found = _stat(path)
            if path.name not in known and found and now_s - found.st_mtime > ABANDONED_S:
                path.unlink(missing_ok=True)


def _stat(path: Path) -> os.stat_result | None:
    """None of what another replica has moved or deleted since it was listed."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
