from pathlib import Path

import pytest

from services.api.batches.database import Database, signed


def test_all_of_a_transaction_or_nothing_of_it(tmp_path: Path) -> None:
    one, two = Database(tmp_path), Database(tmp_path)
    query = "INSERT INTO files VALUES ('a', 'me', 'name', 'batch', 1, 1, NULL)"

    def half() -> None:
        with one.writing() as run:
            run.execute(query)
            raise LookupError

    with pytest.raises(LookupError):
        half()
    assert two.run.execute("SELECT COUNT(*) FROM files").fetchone()[0] == 0
    with one.writing() as run:
        run.execute(query)
        assert two.run.execute("SELECT COUNT(*) FROM files").fetchone()[0] == 0, "others see whole ones"
    assert two.run.execute("SELECT COUNT(*) FROM files").fetchone()[0] == 1
    one.close()
    two.close()


def test_incarnations_fit() -> None:
    assert [signed(each) for each in (0, 5, (1 << 64) - 3, 1 << 63)] == [0, 5, -3, -(1 << 63)]
