"""`valence logs`: the lines of the services' log files, each marked with its process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from valence.display import tail
from valence.errors import CommandError


class Logs:
    """The log files of a run, of all services or of one."""

    def __init__(self, folder: Path, service: str = "") -> None:
        self._folder = folder
        self._service = service
        self._read: dict[Path, int] = {}
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):  # just rotated: all of what takes its place is new
                self._read[path] = path.stat().st_size
        if service and not self._read:
            names = ", ".join(sorted(path.stem for path in folder.glob("*.log")))
            raise CommandError(f"no log of {service!r}; there are {names}")

    def _files(self) -> list[Path]:
        files = sorted(self._folder.glob("*.log"))
        return [f for f in files if not self._service or self._service in (f.stem, f.stem.rpartition("-")[0])]

    def last(self, count: int) -> Iterator[str]:
        """The last lines of each file."""
        for path in self._read:
            yield from (_marked(path, line) for line in tail(path, count))

    def new(self) -> Iterator[str]:
        """Whole lines written since the call before, also to files that are new or were rotated."""
        for path in self._files():
            try:
                with open(path, "rb") as file:
                    offset = self._read.get(path, 0)
                    if file.seek(0, 2) < offset:
                        offset = 0
                    file.seek(offset)
                    text = file.read()
            except FileNotFoundError:  # just rotated, and not begun again
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = offset + len(whole)
            yield from (_marked(path, line) for line in whole.decode(errors="replace").splitlines())


def _marked(path: Path, line: str) -> str:
    """The services' own text lines carry their name already; others, like a traceback, do not."""
    return line if path.stem in line else f"{path.stem} | {line}"
