"""Time of the bundled model's matrix products in each weight format, by number of rows; memory and rounding error.

Walks through all layers' weights as a decode step does, so that caches are as cold as they are there. The output head
is timed apart. `.venv/bin/python -m benchmarks.weights [--threads N] [--json OUT]`
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.report import Result, report
from services.worker.quant.contract import StoredTensor, Weight, WeightFormat
from services.worker.quant.int4 import Int4Format
from services.worker.quant.int8 import Int8Format
from services.worker.quant.none import DenseFormat, DenseWeight
from services.worker.quant.packed import PackedBf16Format, PackedFp16Format
from services.worker.source import open_model

ROWS = (1, 2, 4, 8, 16, 64, 512)
LINEARS: tuple[tuple[str, ...], ...] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
CPU = torch.device("cpu")
FORMATS: dict[str, WeightFormat] = {
    "fp32": DenseFormat(torch.float32, torch.float32, CPU),
    "bf16": DenseFormat(torch.bfloat16, torch.float32, CPU),
    "fp16_packed": PackedFp16Format(),
    "bf16_packed": PackedBf16Format(),
    "int4": Int4Format(),
    "int8": Int8Format(),
}


def fastest_us(run: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Wall time and processor time of the fastest of `rounds` runs after one that warms up, microseconds."""
    run()
    wall_us, cpu_us = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        wall_us.append((time.perf_counter() - wall) * 1e6)
        cpu_us.append((time.process_time() - cpu) * 1e6)
    return min(wall_us), min(cpu_us)


def relative_error(weight: Weight, exact: Weight) -> float:
    x = torch.randn(16, exact.in_features)
    expected = exact.linear(x)
    return float((weight.linear(x) - expected).norm() / expected.norm())


def measure(name: str, form: WeightFormat, groups: Sequence[Sequence[StoredTensor]], conditions: str) -> list[Result]:
    """`groups`: the matrices of one kind of step, walked through in order."""
    weights = [form.make(parts) for parts in groups]
    exact = DenseWeight(torch.cat([part.dense(torch.float32) for part in groups[0]]))
    megabytes = sum(weight.num_bytes for weight in weights) / 1e6
    results = [
        Result(f"weights_{name}_mb", megabytes, "MB", conditions),
        Result(f"weights_{name}_error", relative_error(weights[0], exact), "of the result's norm", conditions),
    ]
    for num_rows in ROWS:
        inputs = {weight.in_features: torch.randn(num_rows, weight.in_features) for weight in weights}

        def step(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in weights:
                weight.linear(inputs[weight.in_features])

        wall_us, cpu_us = fastest_us(step, 8 if num_rows <= 64 else 2)
        results.append(Result(f"weights_{name}_{num_rows}_us", wall_us, "us", conditions))
        results.append(Result(f"weights_{name}_{num_rows}_cpu_us", cpu_us, "us of processor time", conditions))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = open_model("bundled")
    num_layers = sum(name.endswith("o_proj.weight") for name in source.tensors)
    layers = [
        [source.tensors[f"model.layers.{i}.{part}.weight"] for part in parts]
        for i in range(num_layers)
        for parts in LINEARS
    ]
    head = [[source.tensors["model.embed_tokens.weight"]]]
    capability = torch.backends.cpu.get_cpu_capability()
    results: list[Result] = []
    with torch.inference_mode():
        for name, form in FORMATS.items():
            for kind, groups in (("layers", layers), ("head", head)):
                if form.unavailable() is None and form.refuses(groups[0]) is None:
                    conditions = f"{kind} of the bundled model, {arguments.threads} threads, {capability}, fastest run"
                    results += measure(f"{name}_{kind}", form, groups, conditions)
    report(results, arguments.json, "Weight formats")


if __name__ == "__main__":
    main()
