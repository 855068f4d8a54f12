"""Graphs without a device that captures: a replay calls the step."""

import torch

from services.worker import graphs
from services.worker.graphs import Captured, GraphKey, Graphs, StepColumns, StepInputs
from services.worker.staging import offsets


class CalledGraphs(Graphs):
    """Calls the step where a device would replay it."""

    def _capture(self, key: GraphKey, columns: StepColumns, forward: graphs.Forward) -> Captured:
        self.calls: list[GraphKey] = []
        given = StepInputs.at(self._place, key)

        class Call:
            def replay(_) -> None:
                self.calls.append(key)
                for kept, value in zip(outputs, forward(key, given), strict=True):
                    kept.copy_(value)

        for target, column in zip(given, columns, strict=True):
            target.copy_(torch.from_numpy(column))
        outputs = forward(key, given)
        return Captured(Call(), self._place[: offsets(columns)[1]], given, outputs)  # type: ignore[arg-type]
