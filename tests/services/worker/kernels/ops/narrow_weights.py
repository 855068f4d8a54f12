"""Weights of 4 and 8 bits decoded number by number in float64, for what ops are held against."""

import torch
from torch import Tensor

from services.worker.kernels.packing.mx import VALUES


def int4_by_number(packed: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """packed: [N, K / 2]; scales, zeros: [N, K / group]."""
    rows = torch.zeros(len(packed), packed.shape[1] * 2, dtype=torch.float64)
    group = rows.shape[1] // scales.shape[1]
    for column in range(rows.shape[1]):
        number = (packed[:, column // 2] >> 4 * (column % 2) & 15).double()
        zero = 8 if zeros is None else zeros[:, column // group].double()
        rows[:, column] = (number - zero) * scales[:, column // group].double()
    return rows


def int8_by_number(weight: Tensor, scales: Tensor) -> Tensor:
    rows = weight.double()
    group = rows.shape[1] // scales.shape[1]
    for column in range(rows.shape[1]):
        rows[:, column] *= scales[:, column // group].double()
    return rows


def mxfp4_by_number(packed: Tensor, scales: Tensor) -> Tensor:
    rows = torch.zeros(len(packed), packed.shape[1] * 2, dtype=torch.float64)
    for column in range(rows.shape[1]):
        codes = packed[:, column // 2] >> 4 * (column % 2) & 15
        values = torch.tensor(VALUES, dtype=torch.float64)[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
        rows[:, column] = values * 2.0 ** (scales[:, column // 32].double() - 127)
    return rows


def mxfp8_by_number(numbers: Tensor, scales: Tensor) -> Tensor:
    rows = numbers.double()
    for column in range(rows.shape[1]):
        rows[:, column] *= 2.0 ** (scales[:, column // 32].double() - 127)
    return rows
