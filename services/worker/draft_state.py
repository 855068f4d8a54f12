"""What only the device knows of rows that step with drafts. Owner: the runner's step; part of `Rows`.

The host plans for the most; how many drafts held is on the device, where the next step begins with it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker import memory


class DraftState:
    """Of max_rows rows and the padding row. `most`: drafts of one row, which lie behind its tokens in Rows.tokens."""

    def __init__(self, max_rows: int, most: int, device: torch.device) -> None:
        self.most = most
        self.lengths = memory.zeros((max_rows + 1,), torch.int64, device)  # tokens of each row that has sampled
        self.held = memory.zeros((max_rows + 1,), torch.int32, device)  # drafts of each row's last step that held
        self.drafted = memory.zeros((max_rows + 1,), torch.int32, device)  # drafts that lie behind them
        self.adrift = np.zeros(max_rows, np.bool_)  # rows whose place the host does not know exactly

    def start(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """New rows, of so many tokens; nothing is left of who had the slots before."""
        places = np.array(slots)
        scatter(self.lengths, [places], [np.array(lengths)])
        scatter(self.held, [places], [np.zeros(len(slots), np.int32)])
        self.adrift[places] = False


def scatter(target: Tensor, places: Sequence[npt.NDArray[Any]], values: Sequence[npt.NDArray[Any]]) -> None:
    """target.view(-1)[places] = values, all in one copy, without waiting for the device."""
    index, content = torch.from_numpy(np.concatenate(places)), torch.from_numpy(np.concatenate(values))
    if target.device.type != "cpu":
        index, content = (part.pin_memory().to(target.device, non_blocking=True) for part in (index, content))
    target.view(-1).index_copy_(0, index, content)
