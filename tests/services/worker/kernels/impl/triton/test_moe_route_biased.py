"""The Triton implementation of moe_route_biased against the op's meaning."""

import torch

from services.worker.kernels.impl.triton.moe_route_biased import IMPL, refuses
from services.worker.kernels.ops.moe_route_biased import make_biased_route_case, moe_route_biased
from services.worker.kernels.registry import Facts
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
    hold(IMPL, cases=[make_biased_route_case(4, 30, (3, 2), 5), make_biased_route_case(3, 20, (5, 3), 1)])


def test_of_equals_the_lower_and_no_expert_of_a_closed_group(device: torch.device) -> None:
    for groups, top in ((4, 2), (1, 1)):
        logits, bias = torch.zeros(2, 12, device=device), torch.zeros(12, device=device)
        logits[1, 7] = 1.0
        bias[9] = 0.5
        arguments = (logits, bias, groups, top, 4, False, 1.5)
        weights, experts = IMPL.run(*arguments)
        wanted_weights, wanted_experts = moe_route_biased.meaning(*arguments)
        assert torch.equal(experts.cpu(), wanted_experts.cpu())
        torch.testing.assert_close(weights, wanted_weights)


def test_more_experts_than_a_program_holds_are_refused() -> None:
    assert refuses(Facts("cuda", "sm_90", shapes={"num_experts": 2048})) == "more than 1024 experts"
