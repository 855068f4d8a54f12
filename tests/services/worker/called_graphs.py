"""Graphs without a device that captures: a replay calls the step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from services.worker import graphs
from services.worker.graphs import Captured, GraphKey, Graphs, StepColumns, StepInputs
from services.worker.staging import offsets
from services.worker.state import Rows


class CalledGraphs(Graphs):
    """Calls the step where a device would replay it."""

    def _capture(
        self, key: GraphKey, columns: StepColumns, forward: graphs.Forward, sequel: graphs.Sequel | None
    ) -> Captured:
        self.calls: list[GraphKey] = []
        self.followed: list[GraphKey] = []
        given = StepInputs.at(self._place, key, self._tables)

        class Call:
            def replay(_) -> None:
                self.calls.append(key)
                for kept, value in zip(outputs, forward(key, given), strict=True):
                    kept.copy_(value)

        class Following:
            def replay(_) -> None:
                assert sequel is not None
                self.followed.append(key)
                sequel(key, given, outputs)

        for target, column in zip(given, columns, strict=True):
            target.copy_(torch.from_numpy(column))
        outputs = forward(key, given)
        following: Any = None
        if sequel is not None:
            sequel(key, given, outputs)
            following = Following()
        return Captured(Call(), self._place[: offsets(columns)[1]], given, outputs, following)  # type: ignore[arg-type]


def on_device(rows: Rows) -> None:
    """Block tables as on a device, where the host does not know where rows with drafts stand."""
    for group in (rows.first, *rows.beside):
        if not group.is_state:
            group.resident = torch.zeros(rows.tokens.shape[0], group.tables.shape[1], dtype=torch.int32)


def capture(driver: Any, keys: Sequence[GraphKey], monkeypatch: pytest.MonkeyPatch) -> CalledGraphs:
    """From now on the driver's steps are replayed, with block tables as on a device."""
    monkeypatch.setattr("services.worker.runner.Graphs", CalledGraphs)
    on_device(driver.runner.rows)
    driver.runner.capture(keys, lambda done, total: None)
    made: CalledGraphs = driver.runner._graphs
    return made
