"""What a plan is told of the rows' tables."""

from common.columns import pack_i32
from common.protocol import Copies, Growth
from services.scheduler.changes import Changes, Columns


def test_the_first_group_and_pool_have_columns_of_their_own() -> None:
    changes = Changes()
    assert not changes.any
    changes.grow(0, 3, [7, 8])
    changes.grow(2, 3, [1])
    changes.grow(0, 5, [9])
    changes.copy(1, 4, 6)
    changes.copy(0, 2, 0)
    changes.copy(1, 5, 7)
    changes.hold(1, 4)
    changes.save(11)
    assert changes.any and changes.held == [(1, 4)]
    assert changes.drain() == Columns(
        pack_i32([3, 3, 5]),
        pack_i32([7, 8, 9]),
        pack_i32([2]),
        pack_i32([0]),
        (Growth(2, pack_i32([3]), pack_i32([1])),),
        (Copies(1, pack_i32([4, 5]), pack_i32([6, 7])),),
        [11],
    )
    assert not changes.any and changes.drain() == Columns()._replace(saved=[])
