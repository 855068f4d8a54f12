import torch

from services.worker.kernels.ops.quantize_groups import quantize_groups
from services.worker.kernels.ops.quantize_rows import quantize_rows


def test_every_group_is_a_row_of_its_own() -> None:
    for dtype in quantize_groups.tolerances:
        for case in quantize_groups.cases:
            x, stored, group, by_column = case.make(dtype)
            numbers, scales = quantize_groups.meaning(x, stored, group, by_column)
            assert numbers.shape == x.shape and numbers.dtype == stored and scales.is_contiguous()
            by_token = scales.T if by_column else scales
            assert by_token.shape == (len(x), x.shape[1] // group) and by_token.dtype == torch.float32
            for place, part in enumerate(x.split(group, -1)):
                wanted, wanted_scales = quantize_rows.meaning(part, stored)
                columns = slice(place * group, (place + 1) * group)
                assert torch.equal(numbers[:, columns].float(), wanted.float())
                assert torch.equal(by_token[:, place : place + 1], wanted_scales)
