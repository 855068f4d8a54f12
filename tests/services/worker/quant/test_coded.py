"""A coded matrix: any part of it is that part of the whole; a rank's logits are those of one rank."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.kernels.registry import Bindings
from services.worker.layers.mlp import GatedMlp
from services.worker.layers.moe import MoeMlp
from services.worker.loader import served_tensors
from services.worker.models.registry import find_model
from services.worker.models.spec import Config
from services.worker.quant.assemble import assemble
from services.worker.quant.coded import Coded, check_scales
from services.worker.quant.detect import read_rules
from services.worker.quant.narrow import narrow
from services.worker.shares import Rank
from services.worker.source import open_model
from tests.services.worker.quant.coded_checkpoints import DENSE, MOE, coded, random_tensors, write, write_pair
from tests.services.worker.quant.kinds import KINDS
from tests.services.worker.quant.loading import BINDINGS, load, logits

DOWN = "model.layers.0.mlp.down_proj.weight"


def opened(folder: Path) -> dict[str, Any]:
    source = open_model(str(folder))
    _, model = find_model(list(source.config["architectures"]))  # type: ignore[call-overload]
    spec = model.read(Config(source.config))
    shapes = {DOWN: (spec.hidden_size, spec.intermediate_size)}
    return assemble(served_tensors(source.tensors, model, spec), shapes, read_rules(source.config, "config.json"))


@pytest.mark.parametrize("name", KINDS)
def test_a_part_is_that_part_of_the_whole(name: str, tmp_path: Path) -> None:
    """Also of a part, and where it begins and ends within blocks, groups and words."""
    weight = random_tensors(DENSE)[DOWN]
    pieces, meant = coded(KINDS[name], {DOWN: weight})
    whole = opened(write(tmp_path, DENSE, pieces, KINDS[name].settings))[DOWN]
    assert isinstance(whole, Coded) and whole.shape == (128, 256) and "model.safetensors" in whole.source
    wide = whole.dense(torch.float32)
    torch.testing.assert_close(wide, meant[DOWN], rtol=1e-6, atol=1e-7)
    for rows, columns in (((0, 64), (64, 256)), ((24, 104), (0, 256)), ((3, 90), (40, 72)), ((0, 128), (136, 200))):
        part = narrow(narrow(whole, 0, *rows), 1, *columns)
        assert part.shape == (rows[1] - rows[0], columns[1] - columns[0])
        assert torch.equal(part.dense(torch.float32), wide[slice(*rows), slice(*columns)])
        again = narrow(narrow(part, 1, 4, 28), 0, 5, 40)
        assert torch.equal(again.dense(torch.float32), part.dense(torch.float32)[5:40, 4:28])


class Meeting:
    """Collectives of ranks that are threads of this process."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._given: list[Tensor] = [torch.empty(0)] * ranks

    def bindings(self, rank: int) -> Bindings:
        def all_given(x: Tensor) -> list[Tensor]:
            self._given[rank] = x.clone()
            self._barrier.wait(60)
            given = list(self._given)
            self._barrier.wait(60)
            return given

        def all_reduce(x: Tensor) -> None:
            x.copy_(torch.stack(all_given(x)).sum(0))

        def all_gather(x: Tensor, out: Tensor) -> None:
            out.copy_(torch.cat(all_given(x)))

        chosen = {row.op: BINDINGS._chosen[row.op] for row in BINDINGS.table}
        return Bindings(BINDINGS.table, {**chosen, "all_reduce": all_reduce, "all_gather": all_gather})


def logits_of_ranks(folder: Path, ranks: int, form: str, experts: bool) -> list[Tensor]:
    meeting, found = Meeting(ranks), [torch.empty(0)] * ranks
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            decoder, _ = load(folder, rank=Rank(rank, ranks), bindings=meeting.bindings(rank))
            layer = decoder.layers[0]
            assert layer.attention.out.weight.format_name == layer.attention.project.weight.format_name == form
            if isinstance(layer.mlp, MoeMlp):
                assert layer.mlp.experts.format_name == (form if experts else "none")
            else:
                assert isinstance(layer.mlp, GatedMlp) and layer.mlp.down.weight.format_name == form
            found[rank] = logits(decoder)
        except BaseException as problem:
            failed.append(problem)
            meeting._barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


TORCHAO = ("torchao_fp8", "torchao_int4")
OF_EACH = ("compressed_fp8", "autofp8_static", "deepseek", "compressed_int8", "quark_mxfp4", "compressed_mxfp8")


@pytest.mark.parametrize("name", [*OF_EACH, "awq", "gptq_ordered", "gptq_eight", *TORCHAO])
def test_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    """Heads of 32 make shares that no block or group divides; inner widths are divided in whole blocks."""
    kind = KINDS[name]
    for config in (DENSE, MOE):
        config = {**config, "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 2}
        folder, _ = write_pair(tmp_path / config["architectures"][0], config, kind)
        alone = logits(load(folder)[0])
        for ranks in (2, 4):
            found = logits_of_ranks(folder, ranks, kind.form, kind.experts)
            assert all(torch.equal(one, found[0]) for one in found)
            distance = float((found[0] - alone).norm() / alone.norm())
            assert distance < (2e-5 if kind.exact else 0.08), f"{ranks} ranks, {config['architectures']}"


def test_scales_that_no_matrix_has() -> None:
    class Named:
        name, source = "q_proj.weight_scale", "model.safetensors"

    tensor: Any = Named()
    check_scales(torch.tensor([1e-8, 3.0]), tensor)
    check_scales(torch.tensor([0, 254], dtype=torch.uint8), tensor)
    for scales, what in (
        (torch.tensor([1.0, float("nan")]), "NaN"),
        (torch.tensor([float("inf")]), "infinite"),
        (torch.tensor([1.0, 0.0]), "zero"),
        (torch.tensor([-1.0]), "negative"),
        (torch.tensor([255, 3], dtype=torch.uint8), "NaN"),
    ):
        with pytest.raises(Exception, match=rf'^model.safetensors: tensor "q_proj.weight_scale" holds .*{what}'):
            check_scales(scales, tensor)
