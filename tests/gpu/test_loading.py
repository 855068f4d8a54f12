"""Weights come to the GPU by a ring of pinned buffers, more of them than the ring holds, as they are in the file."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from services.worker.file_reader import SLOT_BYTES, SLOTS, FileReader
from services.worker.safetensors_file import read_folder

GPU = torch.device("cuda")


def test_what_arrives_is_what_is_stored(tmp_path: Path) -> None:
    many = SLOTS * SLOT_BYTES // 2 // 1024 + 7
    stored = {
        "large": torch.randn(many, 1024).to(torch.bfloat16),
        **{f"small{i}": torch.randn(96, 64).to(torch.bfloat16) for i in range(4 * SLOTS)},
        "norm": torch.randn(33),
    }
    save_file(stored, tmp_path / "model.safetensors")
    tensors = read_folder(tmp_path, FileReader(GPU))
    for dtype in (torch.bfloat16, torch.float32):
        found = {name: tensor.dense(dtype) for name, tensor in tensors.items()}
        for name, tensor in found.items():
            assert tensor.device.type == "cuda" and torch.equal(tensor.cpu(), stored[name].to(dtype)), name
    part = tensors["large"].narrow(0, 5, many - 2).narrow(1, 100, 300)  # type: ignore[attr-defined]
    assert torch.equal(part.dense(torch.bfloat16).cpu(), stored["large"][5 : many - 2, 100:300])
