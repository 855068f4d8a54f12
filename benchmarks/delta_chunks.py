"""What the gated delta rule over prompts takes a layer on a GPU, and each of its kernels.

    python -m benchmarks.delta_chunks [--prompts 1x2048,4x2048,1x8192,64x128]

Sizes are Qwen3-Next's: 16 key heads of 128, 32 value heads of 128, bf16, without the norm behind it. First a ragged
step is held against the op's meaning in fp32; then calls are timed in a replayed graph, and their kernels
by the profiler.
"""

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.kernel_time import per_call_us
from services.worker.kernels.impl.triton.gated_delta import gated_delta_by_state
from services.worker.kernels.ops.causal_conv import make_state_rows
from services.worker.kernels.ops.gated_delta import gated_delta
from services.worker.kernels.outcome import convert

HEADS, SHARE, WIDTH = 16, 2, 128
PROFILED = 5  # calls
RAGGED = [1, 77, 0, 300, 1, 64]
KERNELS = ("inverse", "prepare", "walk")


def make_step(counts: list[int], device: torch.device) -> tuple[Any, ...]:
    """Arguments of gated_delta for rows that start."""
    generator = torch.Generator(device).manual_seed(len(counts))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    qkv = random(sum(counts), HEADS, (2 + SHARE) * WIDTH) + 0.5
    gates = random(sum(counts), HEADS, 2 * SHARE)
    decay, bias = random(HEADS * SHARE).abs() * 2 + 0.02, random(HEADS * SHARE).sigmoid() - 1.0
    state = random(len(counts), HEADS * SHARE, WIDTH, WIDTH)
    rows = make_state_rows(counts, [0] * len(counts), list(range(len(counts))))
    return qkv.bfloat16(), gates.bfloat16(), decay, bias, state, *convert(rows, lambda tensor: tensor.to(device))


def largest_error(device: torch.device) -> float:
    """Of results and states of a ragged step, against the meaning with the same numbers in fp32."""
    arguments = make_step(RAGGED, device)
    exact = convert(arguments, lambda t: t.float().cpu() if t.is_floating_point() else t.cpu())
    got, wanted = gated_delta_by_state(*arguments), gated_delta.meaning(*exact)
    pairs = (got, wanted), (arguments[4], exact[4])
    return max(float((one.float().cpu() - other).abs().max()) for one, other in pairs)


def parts_us(arguments: tuple[Any, ...]) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            gated_delta_by_state(*arguments)
        torch.cuda.synchronize()
    events = {event.key: event.device_time_total / event.count for event in seen.key_averages()}
    return {part: sum(us for key, us in events.items() if f"delta_{part}_kernel" in key) for part in KERNELS}


def main() -> None:
    parser = argparse.ArgumentParser(description="The gated delta rule over prompts")
    parser.add_argument("--prompts", default="1x2048,4x2048,1x8192,64x128", help="rows x tokens")
    options = parser.parse_args()
    device, console = torch.device("cuda", torch.cuda.current_device()), Console(highlight=False)
    console.print(f"largest error of a ragged step: {largest_error(device):.1e}")
    table = Table("prompts", "us", *KERNELS)
    for name in options.prompts.split(","):
        rows, tokens = map(int, name.split("x"))
        sets = [make_step([tokens] * rows, device) for _ in range(2)]
        figures = per_call_us(gated_delta_by_state, sets), *parts_us(sets[0]).values()
        table.add_row(name, *(f"{figure:.1f}" for figure in figures))
    console.print(table)


if __name__ == "__main__":
    main()
