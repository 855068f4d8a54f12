"""`python -m tests.e2e.drafted FOLDER RANK RANKS`: one rank of a group whose rows have drafts, for every case of the
folder's `cases.json`: settings of an engine by name.

Prints as JSON, by case, what this rank's scheduler core has heard said, and how many drafts held. Called by
test_draft_ranks.py, which starts all ranks at once: each has a core of its own, and equal results make equal plans.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from common import config as configuration
from services.worker.group import Place
from services.worker.model_engine import ModelEngine
from tests.e2e.test_draft_equality import BLOCK_TOKENS, MAX_LEN, ROWS, long_admits, say

SETTINGS = (
    *("model.dtype=float32", "worker.device=cpu", "worker.threads=1", 'worker.kernels=["torch"]', "kv.blocks=30"),
    *(f"scheduler.max_rows={ROWS}", f"kv.block_tokens={BLOCK_TOKENS}", f"model.max_len={MAX_LEN}"),
    f"kv.checkpoint_tokens={2 * BLOCK_TOKENS}",
)


def said_by(settings: list[str], place: Place | None = None) -> dict[str, Any]:
    own = [f"worker.tensor_parallel={place.ranks}"] if place is not None else []
    engine = ModelEngine(configuration.load(None, [*SETTINGS, *own, *settings]), lambda progress: None, place=place)
    said, figures = say(lambda: engine.execute, engine.facts, long_admits(28))
    names = "draft_tokens", "accepted_tokens", "preemptions"
    return {"said": {str(seq_id): tokens for seq_id, (tokens, _) in said.items()}} | {n: figures[n] for n in names}


def main() -> None:
    torch.set_num_threads(1)
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    cases: dict[str, list[str]] = json.loads((folder / "cases.json").read_text())
    heard = {}
    for name, settings in cases.items():
        heard[name] = said_by(settings, Place(rank, ranks, str(folder / f"{name}.ranks")))
        dist.destroy_process_group()
    print(json.dumps(heard))


if __name__ == "__main__":
    main()
