"""What only the device knows of rows that step with drafts. Owner: the runner's step; part of `Rows`.

The host plans for the most; how many drafts held is on the device, where the next step begins with it.
"""

import numpy as np
import torch

from services.worker import memory


class DraftState:
    """Of max_rows rows and the padding row. `most`: drafts of one row, which lie behind its tokens in Rows.tokens."""

    def __init__(self, max_rows: int, most: int, device: torch.device) -> None:
        self.most = most
        self.lengths = memory.zeros((max_rows + 1,), torch.int64, device)  # tokens of each row that has sampled
        self.drafted = memory.zeros((max_rows + 1,), torch.int32, device)  # drafts that lie behind them
        self.adrift = np.zeros(max_rows, np.bool_)  # rows whose place the host does not know exactly
