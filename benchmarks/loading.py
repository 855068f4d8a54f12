"""How fast a checkpoint is loaded: shards are written to a folder and read warm; GB/s, and memory of the host.

The shapes are those of a model of benchmarks/models.py cut to some layers; the numbers repeat, which no reader notices.
The floor beside it is one thread's copy out of the page cache. Goal: 2 GB/s, and less host memory than 1.3 times the
largest shard beside the weights.

    python -m benchmarks.loading --model 8b --folder /tmp/shards --set worker.device=cuda
    python -m benchmarks.loading --model 8b --layers 6 --set worker.device=cpu --set model.dtype=bfloat16
"""

import argparse
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import models
from benchmarks.report import Result, report
from common import config as configuration
from common.config import Config
from services.worker import compile as levels
from services.worker.fallback import find
from services.worker.file_reader import FileReader
from services.worker.loader import expected_shapes
from services.worker.model_engine import choose_device, load_model
from services.worker.models.spec import Config as ModelConfig
from services.worker.source import open_model
from services.worker.startup import Stages
from valence.display import Stage, StartDisplay

BLOCK = 8 << 20  # numbers that repeat
GOAL_GBPS = 2.0


def write_shards(folder: Path, shapes: Mapping[str, tuple[int, ...]], most_bytes: int) -> list[Path]:
    """In bf16, each of at most so many bytes or one tensor, and their index."""
    block = (torch.randn(BLOCK, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    content = block.view(torch.uint8).numpy().data
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in shapes.items():
        size = 2 * prod(shape)
        if held + size > most_bytes and parts[-1]:
            parts.append({})
            held = 0
        parts[-1][name], held = shape, held + size
    paths = [folder / f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        header, end = {}, 0
        for name, shape in part.items():
            size = 2 * prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for begin in range(0, end, len(content)):
                file.write(content[: min(len(content), end - begin)])
    named = {name: path.name for path, part in zip(paths, parts, strict=True) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    return paths


def cut(folder: Path, layers: int) -> None:
    """The model in `folder` with fewer layers."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": layers}))


def shapes_in(folder: Path, config: Config) -> dict[str, tuple[int, ...]]:
    given = ModelConfig(json.loads((folder / "config.json").read_text()))
    _, model = find(given.get(list, "architectures"), config)
    return expected_shapes(model.read(given), model.names)


def reads(paths: list[Path]) -> Iterator[int]:
    """One thread reads everything, and nothing else is done with it. Bytes of each read."""
    place = bytearray(16 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(place):
                yield count


def peak_bytes() -> int:
    """The most memory of this process since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def forget_peak() -> int:
    """Returns what is in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def load(folder: Path, config: Config, device: torch.device) -> tuple[float, int, int]:
    """Seconds of the weights, the host's memory at most beside what it had, and the bytes that weights keep there."""
    display = StartDisplay(Console(stderr=True))
    stages = Stages(lambda progress: display.show([Stage(progress.stage, progress.done, progress.total)]))
    level = levels.choose_level(config.worker.compile_level, device)
    before = forget_peak()
    with display:
        loaded = load_model(open_model(str(folder), reader=FileReader(device)), config, device, stages, level)
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        stages.end()
    kept = sum(tensor.nbytes for tensor in levels.tensors_of(loaded.model, set())) if device.type == "cpu" else 0
    return stages.seconds["weights"], peak_bytes() - before, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=0, help="0: all")
    parser.add_argument("--shard-gb", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, help="where shards are written, and removed again")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="settings of the services")
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        measure(Path(name), arguments)


def measure(root: Path, arguments: argparse.Namespace) -> None:
    folder = root / "model"
    shutil.copytree(models.find_model(arguments.model), folder)
    if arguments.layers:
        cut(folder, arguments.layers)
    config = configuration.load(None, [f"model.source={folder}", *arguments.set])
    device = choose_device(config.worker.device)
    begun_s = time.perf_counter()
    paths = write_shards(folder, shapes_in(folder, config), int(arguments.shard_gb * 1e9))
    total = sum(path.stat().st_size for path in paths)
    print(f"{total / 1e9:.1f} GB in {len(paths)} shards, written in {time.perf_counter() - begun_s:.1f} s", flush=True)
    begun_s = time.perf_counter()
    total = sum(reads(paths))
    copied = total / (time.perf_counter() - begun_s) / 1e9
    largest = max(path.stat().st_size for path in paths)
    conditions = (
        f"{arguments.model}, {total / 1e9:.1f} GB of bf16, largest shard {largest / 1e9:.2f} GB, {device}, "
        + (", ".join([f"{len(os.sched_getaffinity(0))} cores", *arguments.set]))
    )
    runs = [load(folder, config, device) for _ in range(arguments.runs)]
    for took_s, most, kept in runs:
        print(
            f"{took_s:.2f} s, {total / took_s / 1e9:.2f} GB/s, {(most - kept) / 1e9:.2f} GB of the host's memory beside"
        )
    took_s, most, kept = min(runs)
    results = [
        Result("loading_gbps", total / took_s / 1e9, "GB/s", conditions),
        Result("loading_host_share", (most - kept) / largest, "of the largest shard", conditions),
        Result("loading_one_thread_gbps", copied, "GB/s", f"{conditions}, only reading"),
    ]
    report(results, arguments.json, f"Loading (goals: {GOAL_GBPS:.0f} GB/s, 1.3 shards)")


if __name__ == "__main__":
    main()
