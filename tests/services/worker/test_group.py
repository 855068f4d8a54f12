"""Three processes that meet in a file: what they agree on, and that sums are the same in every bit at all of them."""

import json
import struct
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional

from services.worker.group import Group
from services.worker.shares import Rank
from tests.services.worker.together import HIDDEN, INNER, VOCABULARY, values

RANKS = 3
LIMIT_S = 300


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    command = [sys.executable, "-m", "tests.services.worker.together", str(meeting), str(RANKS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
    each: list[dict[str, Any]] = json.loads(done.stdout)
    return each


def test_all_know_what_each_has_told(said: list[dict[str, Any]]) -> None:
    assert [each["told"] for each in said] == [["rank 0", "rank 1", "rank 2"]] * RANKS
    assert [each["least"] for each in said] == [98] * RANKS


def test_the_first_rank_goes_alone(said: list[dict[str, Any]]) -> None:
    assert said[0]["order"] == ["0"] and all(each["order"][0] == "0" for each in said)


@pytest.mark.parametrize(("rank", "order"), [(0, ["body", "all are here"]), (1, ["all are here", "body"])])
def test_the_others_wait_until_the_first_has_gone(monkeypatch: pytest.MonkeyPatch, rank: int, order: list[str]) -> None:
    happened: list[str] = []
    group = Group.__new__(Group)
    group.rank = Rank(rank, 2)
    monkeypatch.setattr(group, "meet", lambda: happened.append("all are here"))
    with group.first_alone():
        happened.append("body")
    assert happened == order


def test_ranks_that_differ_do_not_go_on(said: list[dict[str, Any]]) -> None:
    text = "the ranks of this group have different digest: own 0, own 1, own 2"
    assert [each["unequal"] for each in said] == [text] * RANKS


@pytest.mark.parametrize("what", ["torch.float32", "torch.bfloat16", "embedded", "logits", "summed", "experts"])
def test_every_rank_has_the_same_bits(said: list[dict[str, Any]], what: str) -> None:
    """Routers and samplers of all ranks decide by them."""
    assert all(each[what] == said[0][what] for each in said[1:])


def test_all_ranks_know_that_a_sum_is_wrong_at_one(said: list[dict[str, Any]]) -> None:
    assert [each["sums"] for each in said] == [[True, False]] * RANKS
    assert [each["norms"] for each in said] == [[True, False, False]] * RANKS


def test_nobody_beyond_this_host_is_listened_to(said: list[dict[str, Any]]) -> None:
    assert {address for each in said for address in each["listens"]} == {"127.0.0.1"}
    assert [each["interfaces"] for each in said] == [["lo", "lo"]] * RANKS, "a host may have but this one interface"


def tensor(bits: list[int], *shape: int) -> torch.Tensor:
    return torch.tensor(struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))).view(*shape)


def test_sums_are_sums(said: list[dict[str, Any]]) -> None:
    total = sum(values(3, 1000, seed=rank) for rank in range(RANKS))
    torch.testing.assert_close(tensor(said[0]["torch.float32"], 3, 1000), total)


def test_divided_weights_are_the_whole(said: list[dict[str, Any]]) -> None:
    table, down, bias = values(VOCABULARY, HIDDEN), values(HIDDEN, INNER, seed=1), values(HIDDEN, seed=2)
    x, inner, ids = values(5, HIDDEN, seed=3), values(5, INNER, seed=4), torch.tensor([0, 36, 17, 12, 13])
    assert torch.equal(tensor(said[1]["embedded"], 5, HIDDEN), table[ids]), "zeros are added, so it is exact"
    torch.testing.assert_close(tensor(said[1]["logits"], 5, VOCABULARY), x @ table.T)
    assert said[1]["nothing"] == [0, VOCABULARY]
    torch.testing.assert_close(tensor(said[1]["summed"], 5, HIDDEN), functional.linear(inner, down, bias))
    residual = 1 + RANKS * 2 * values(5, 2, seed=5)[:, :1] * x
    torch.testing.assert_close(tensor(said[1]["experts"], 5, HIDDEN), residual)
