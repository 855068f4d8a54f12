"""A wrong keyword, dtype, layout or value in any call of any op of the provider fails that op's tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.aiter_signatures import declared
from services.worker.kernels.impl.aiter import _all_reduce
from services.worker.kernels.impl.aiter._host import HALF, Function
from tests.services.worker.kernels.impl.aiter.calls import host, impl_of
from tests.services.worker.kernels.impl.aiter.custom import give_custom
from tests.services.worker.kernels.impl.aiter.fake import RELEASES
from tests.services.worker.kernels.impl.aiter.mutants import KINDS, OPS, Mutant, is_found, mutants_of
from tests.services.worker.kernels.impl.aiter.together import CPU, Custom

WIDE, COUNTED, SPEED = "it takes float32 too", "only its size is used", "a bound or a choice for speed alone"
READ = "Triton reads floats of any width"
BYTES = "of pages of 8 bits only, which it does not get"
# What is right in another way, too, by op: where, and why.
FREE = {
    "argmax": {"greedy_sample input dtype": WIDE},
    "moe_int4_whole": {
        "get_optimal_moe_config M value": SPEED,
        "get_optimal_moe_config dtype dtype": SPEED,
        "fused_moe B_scale dtype": READ,
        "fused_moe topk_ids layout": COUNTED,
    },
    "moe_route": {"topk_softmax gating_output dtype": WIDE},
    "moe_route_grouped": {"grouped_topk gating_output dtype": WIDE},
    "paged_attention": {
        "mha_batch_prefill_func kv_indptr layout": COUNTED,
        "mha_batch_prefill_func kv_page_indices layout": COUNTED,
        "mha_batch_prefill_func max_seqlen_k value": SPEED,
        "unified_attention max_seqlen_k value": SPEED,
        "get_recommended_splits num_sequences value": SPEED,
        "pa_decode_gluon max_context_partition_num value": SPEED,
        "unified_attention sinks dtype": READ,
    },
    "rope_kv_write": {
        "fused_qk_rope_reshape_and_cache apply_scale value": BYTES,
        "fused_qk_rope_reshape_and_cache upcast_operand value": BYTES,
    },
}
REACHED: dict[str, set[Function]] = {}


class Sums(Custom):
    """Of a group of one, in the dtypes that AITER's kernels are built for."""

    def _sum(self, x: Tensor) -> Tensor:
        assert x.dtype in HALF
        return super()._sum(x)


@contextmanager
def group_of_one(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whose object for sums is made anew by each call, so that its making is a call like others."""
    give_custom(patch, Sums)
    patch.setattr(_all_reduce, "own_device", lambda: CPU)
    patch.setattr(_all_reduce, "of_process", _all_reduce.of_process.__wrapped__)
    patch.setitem(_all_reduce.NORM_BYTES, 1, 1 << 20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def tried(name: str, arch: str, monkeypatch: pytest.MonkeyPatch, judge: Callable[..., bool]) -> dict[Mutant, bool]:
    """Each mutant of an op, on the newest release that has the call, and whether its tests find it."""
    found: dict[Mutant, bool] = {}
    for release in reversed(RELEASES):
        with host(monkeypatch, release, arch) as patch, ExitStack() as held:
            held.enter_context(group_of_one(patch) if name.startswith("all_reduce") else nullcontext())
            for mutant, cases in mutants_of(impl_of(name), arch).items():
                if mutant not in found:
                    found[mutant] = judge(mutant, cases)
    REACHED[name] = {mutant.function for mutant in found}
    return found


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_call_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(name, "gfx950", monkeypatch, is_found)
    assert {mutant.kind for mutant in found} == {*KINDS}, "an op without a mutation"
    assert {str(mutant) for mutant, is_dead in found.items() if not is_dead} == {*FREE.get(name, ())}


@pytest.mark.parametrize(
    "name", ["quantize_rows", "row_scaled_linear", "moe_row_scaled", "kv_write", "paged_attention"]
)
def test_numbers_of_the_other_architecture_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gfx942 has another type of 8 bits."""
    found = tried(name, "gfx942", monkeypatch, lambda mutant, cases: mutant.kind != "dtype" or is_found(mutant, cases))
    assert {str(mutant) for mutant, is_dead in found.items() if not is_dead} <= {*FREE.get(name, ())}


def test_every_function_is_called_by_some_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """But those that stand in where AITER's compiled part is not installed: test__triton.py runs the real ones."""
    for name in OPS:
        if name not in REACHED:
            tried(name, "gfx950", monkeypatch, lambda mutant, cases: True)
    every = declared()
    twins = {function.twin.by.places for function in every if function.twin is not None}
    reached = {function.places for functions in REACHED.values() for function in functions}
    assert {function.places for function in every} - twins == reached


def test_a_mutant_is_wrong_in_one_argument_of_one_function() -> None:
    function, other = Function("a:b", needs=("x",)), Function("a:c", needs=("x",))
    given = {"x": torch.arange(4.0), "n": 8}
    assert Mutant(function, "x", "layout").change(other, given) is given
    assert Mutant(function, "x", "layout").change(function, given)["x"].tolist() == [3, 2, 1, 0]
    assert Mutant(function, "x", "dtype").change(function, given)["x"].dtype == torch.bfloat16
    assert Mutant(function, "n", "value").change(function, given)["n"] == 4
    assert Mutant(function, "n", "keyword").change(function, given).keys() == {"x", "n_"}
    assert given["n"] == 8 and given["x"].tolist() == [0, 1, 2, 3]
