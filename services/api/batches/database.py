"""The one SQLite database that all API replicas of a host share: its form, and transactions.

Used from one thread at a time. Each writing is one transaction, so a process may die between any two of them.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A later form gets another name of the file, so that an old and a new replica may run side by side.
NAME = "batches-1.sqlite3"
FORM = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created INTEGER NOT NULL, expires INTEGER);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, endpoint TEXT NOT NULL, input TEXT NOT NULL, metadata TEXT NOT NULL,
    created INTEGER NOT NULL, expires INTEGER NOT NULL, status TEXT NOT NULL, changed TEXT NOT NULL DEFAULT '{}',
    errors TEXT NOT NULL DEFAULT '[]', output TEXT, failures TEXT, worker INTEGER,
    total INTEGER NOT NULL DEFAULT 0, done INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, line INTEGER NOT NULL, custom TEXT NOT NULL, body BLOB NOT NULL, worker INTEGER,
    good INTEGER, result BLOB, PRIMARY KEY (batch, line));
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, status TEXT NOT NULL, previous TEXT,
    input TEXT NOT NULL, body TEXT NOT NULL, request BLOB, worker INTEGER, bytes INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS responses_owner ON responses (owner, created);
CREATE INDEX IF NOT EXISTS responses_open ON responses (created) WHERE status IN ('queued', 'in_progress');
CREATE UNIQUE INDEX IF NOT EXISTS lines_custom ON lines (batch, custom);
CREATE INDEX IF NOT EXISTS lines_open ON lines (batch, worker, line) WHERE good IS NULL;
"""
BUSY_S = 20.0  # another replica writes; each write takes milliseconds


class Database:
    def __init__(self, folder: Path) -> None:
        """Makes what is not there. Raises sqlite3.Error."""
        self.run = sqlite3.connect(folder / NAME, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self.run.row_factory = sqlite3.Row
        self.run.execute("PRAGMA journal_mode=WAL")
        self.run.execute("PRAGMA synchronous=FULL")  # what clients were told is there after a power cut
        self.run.executescript(FORM)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        self.run.execute("BEGIN IMMEDIATE")
        with self.run:  # commits, or rolls back
            yield self.run

    def close(self) -> None:
        self.run.close()


def signed(incarnation: int) -> int:
    """SQLite's integers have 64 bits and a sign."""
    return incarnation - (1 << 64) if incarnation >= 1 << 63 else incarnation
