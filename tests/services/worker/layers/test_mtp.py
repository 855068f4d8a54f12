"""What the head computes is held against its formula in tests/services/worker/test_proposers.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from services.worker.division import cuts_of
from services.worker.layers.mtp import with_mtp
from services.worker.loader import expected_shapes
from services.worker.models.glm4_moe import MODEL
from services.worker.shares import Rank
from tests.services.worker.mtp_checkpoint import PREFIX, make_mtp
from tests.services.worker.tiny import MTP, load_decoder


def test_a_model_without_the_layer_is_refused(make_tiny: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="has no layer for it"):
        with_mtp(make_tiny("llama").decoder.spec)


def test_the_layer_is_read_only_where_it_is_asked_for(tmp_path: Path) -> None:
    made = make_mtp(tmp_path)
    plain, whole = load_decoder(made.folder), load_decoder(made.folder, speculative=MTP)
    assert not plain.mtp and len(whole.mtp) == 1
    assert len(plain.layers) == len(whole.layers) == 2 and whole.spec.num_layers == 3
    path = made.folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[PREFIX + "eh_proj.weight"]
    save_file(tensors, path)
    load_decoder(made.folder)
    with pytest.raises(ConfigError, match="eh_proj"):
        load_decoder(made.folder, speculative=MTP)


def test_ranks_have_a_rule_for_each_of_its_tensors(tmp_path: Path) -> None:
    spec = load_decoder(make_mtp(tmp_path).folder, speculative=MTP).spec
    assert torch.Size(expected_shapes(spec, MODEL.names)[PREFIX + "eh_proj.weight"]) == (48, 96)
    missing = set(expected_shapes(spec, MODEL.names)) - {name for name, _ in cuts_of(spec, MODEL.names, Rank(0, 2))}
    assert not missing
