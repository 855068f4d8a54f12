"""`python -m tests.services.worker.divided FOLDER RANKS ...`: a group of so many ranks for the checkpoints in FOLDER.

Prints as JSON, by group, rank and checkpoint, the tokens that the rank has drawn, and its vectors of the same prompts.
Called by test_division.py. One process per rank for all checkpoints, forked from one that has imported torch.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import distributed as dist

from common import config as configuration
from common.errors import ConfigError
from common.pooling import Pooling
from common.protocol import Sampling
from services.worker import model_engine
from services.worker.group import Place
from services.worker.model_engine import ModelEngine
from tests.gpu.conftest import Driver
from tests.services.worker import spelled
from tests.services.worker.forked import said_by
from tests.services.worker.tiny import VOCABULARY

GREEDY = Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)
SAMPLING = (
    GREEDY,
    Sampling(max_tokens=100, temperature=1.0, seed=4, grammar=spelled.regex("[a-z]{2,5}-[0-9]+")),
    Sampling(max_tokens=100, temperature=1.2, seed=8, top_k=30, top_p=0.9, ignore_eos=True),
    Sampling(max_tokens=100, temperature=1.5, seed=9, presence_penalty=0.5, repetition_penalty=1.2, ignore_eos=True),
    Sampling(max_tokens=100, temperature=0.0, logit_bias=((17, 3.0),), frequency_penalty=0.8, ignore_eos=True),
)
POOLINGS = (Pooling("mean"), Pooling("last"), Pooling("mean", dimensions=16), Pooling("last"), Pooling("mean"))
TOKENS = 8
FEW = 4  # that four ranks draw: on two cores, each of their sums is a dozen switches of processes


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY - 1, (length,), generator=generator).tolist() for length in (1, 7, 30, 12, 20)]


def no_words(*_: object) -> NoReturn:
    raise ConfigError("no tokenizer")


def said_of(folder: Path, place: Place | None = None) -> dict[str, Any]:
    """`tokens` by prompt, with the sampling of that place, and `vectors` of the prompts; these go in chunks."""
    ranks = 1 if place is None else place.ranks
    settings = [
        *(f"model.source={folder}", "model.dtype=float32", "worker.device=cpu", "worker.threads=1", "kv.blocks=300"),
        *("scheduler.max_rows=8", "kv.block_tokens=8", 'worker.kernels=["torch"]', f"worker.tensor_parallel={ranks}"),
    ]
    with patch.object(model_engine, "open_words", no_words):  # none has a tokenizer, and transformers is slow to say so
        engine = ModelEngine(configuration.load(None, settings), lambda progress: None, place=place)
    engine._runner.held.grammars = spelled.grammars(engine.facts.vocab_size)
    driver = Driver(engine)
    few = ranks > 2
    tokens = driver.generate(prompts(), FEW if few else TOKENS, SAMPLING, chunk=32 if few else 16)
    return {"tokens": tokens, "vectors": driver.vectors(prompts(), POOLINGS, chunk=16)}


def be_rank(parent: Path, ranks: int, rank: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for folder in sorted(path for path in parent.iterdir() if path.is_dir()):
        said[folder.name] = said_of(folder, Place(rank, ranks, str(parent / f"{folder.name}.{ranks}")))
        dist.destroy_process_group()
    return said


def main() -> None:
    wanted = [(Path(folder), int(ranks)) for folder, ranks in zip(sys.argv[1::2], sys.argv[2::2], strict=True)]
    print(json.dumps({ranks: said_by(ranks, partial(be_rank, folder, ranks)) for folder, ranks in wanted}))


if __name__ == "__main__":
    main()
