"""Worker row slots: which are taken, and which the worker has still to be told about.

Owned by the core's state, written by the planner (take) and by releases (give_back). A slot given back may be taken
again by the same plan, because the worker applies `removed` before `added`.
"""

from common.columns import pack_i32


class SlotPool:
    """Slots 0 .. max_rows - 1. Low numbers are preferred so that the worker's rows stay dense."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._free = list(range(max_rows - 1, -1, -1))
        self._removed: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The slot given back last, or the lowest never used. Raises IndexError if `free` is 0."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        self._removed.append(slot)

    def drain_removed(self) -> bytes:
        """Slots given back since the last call, as the plan's column `removed`."""
        if not self._removed:
            return b""
        column = pack_i32(self._removed)
        self._removed.clear()
        return column

    def check(self, taken: set[int]) -> None:
        """Asserts that `taken` and the free slots divide all slots between them."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & taken, f"slots {sorted(free & taken)} are free and taken"
        assert free | taken == set(range(self.max_rows)), "a slot is neither free nor taken"
        assert len(set(self._removed)) == len(self._removed), "a slot is to be removed twice"
