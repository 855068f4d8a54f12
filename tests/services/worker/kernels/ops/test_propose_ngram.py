import pytest
import torch

from services.worker.kernels.ops.propose_ngram import propose_ngram


def lookup(tokens: list[int], most: int, shortest: int, longest: int) -> list[int]:
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                drafts: list[int] = []
                while len(drafts) < most:
                    drafts += tokens[start + size :]
                return drafts[:most]
    return []


def test_every_row_gets_what_a_search_finds() -> None:
    for case in propose_ngram.cases:
        tokens, drafted, lengths, slots, offsets, *sizes = case.make(torch.float32)
        wanted, numbers = tokens.clone(), drafted.clone()
        for slot, length in enumerate(lengths.tolist()[:-1]):
            drafts = lookup(tokens[slot, :length].tolist(), *sizes)
            wanted[slot, length : length + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
            numbers[slot] = len(drafts)
        propose_ngram.meaning(tokens, drafted, lengths, slots, offsets, *sizes)
        assert torch.equal(tokens, wanted) and torch.equal(drafted, numbers)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([5], []),
        ([5, 5], [5, 5, 5]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2]),
    ],
)
def test_the_longest_match_wins_and_then_the_last(tokens: list[int], drafts: list[int]) -> None:
    assert lookup(tokens, 3, 1, 2) == drafts
    row, zero = torch.zeros(1, 12, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    row[0, : len(tokens)] = torch.tensor(tokens)
    number = torch.full((1,), 9, dtype=torch.int32)
    propose_ngram.meaning(row, number, torch.tensor([len(tokens)]), zero, zero, 3, 1, 2)
    assert row[0, len(tokens) :].tolist()[: len(drafts)] == drafts and number.item() == len(drafts)
