"""The page of failures names tests that exist."""

import re

from tests.arch.rules import ROOT

TEXT = (ROOT / "docs" / "failures.md").read_text()


def test_the_tests_that_prove_it_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", TEXT)
    assert len(named) > 40
    assert sorted({path for path in named if not (ROOT / path).exists()}) == []


def test_every_failure_has_its_proof_and_its_sign() -> None:
    rows = [
        line.split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| failure")
    ]
    assert len(rows) > 20
    for row in rows:
        assert len(row) == 5, row[0]
        assert "`tests/" in row[4] and all(cell.strip() for cell in row), row[0]
