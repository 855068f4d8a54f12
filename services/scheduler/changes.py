"""What the tables of rows have got since the last plan: the columns of the next one. Owned by KvGroups.

Blocks that a plan copies are held until it is complete, so that it does not give them to somebody else.
"""

from collections.abc import Sequence
from typing import NamedTuple

from common.columns import pack_i32
from common.protocol import Copies, Growth


class Columns(NamedTuple):
    """As in StepPlan."""

    grown_slots: bytes = b""
    grown_blocks: bytes = b""
    copy_source: bytes = b""
    copy_target: bytes = b""
    grown: tuple[Growth, ...] = ()
    copies: tuple[Copies, ...] = ()
    saved: Sequence[int] = ()  # labels of checkpoints that the plan makes


Pairs = tuple[list[int], list[int]]


class Changes:
    """`any`: there is something to be told."""

    def __init__(self) -> None:
        self.any = False
        self._grown: dict[int, Pairs] = {}  # by group: slots, blocks
        self._copied: dict[int, Pairs] = {}  # by pool: sources, targets
        self.held: list[tuple[int, int]] = []  # pool, block
        self._saved: list[int] = []

    def grow(self, group: int, slot: int, blocks: Sequence[int]) -> None:
        """`blocks` are appended to the slot's table."""
        self.any = True
        slots, grown = self._grown.setdefault(group, ([], []))
        slots += [slot] * len(blocks)
        grown += blocks

    def copy(self, pool: int, source: int, target: int) -> None:
        self.any = True
        sources, targets = self._copied.setdefault(pool, ([], []))
        sources.append(source)
        targets.append(target)

    def hold(self, pool: int, block: int) -> None:
        self.held.append((pool, block))

    def save(self, label: int) -> None:
        self._saved.append(label)

    def drain(self) -> Columns:
        """Forgets all; who calls it gives back what is `held` before."""
        grown = {group: (pack_i32(slots), pack_i32(blocks)) for group, (slots, blocks) in self._grown.items()}
        copied = {pool: (pack_i32(source), pack_i32(target)) for pool, (source, target) in self._copied.items()}
        columns = Columns(
            *grown.pop(0, (b"", b"")),
            *copied.pop(0, (b"", b"")),
            tuple(Growth(group, *pair) for group, pair in grown.items()),
            tuple(Copies(pool, *pair) for pool, pair in copied.items()),
            self._saved,
        )
        self.any = False
        self._grown, self._copied, self._saved, self.held = {}, {}, [], []
        return columns
