"""Figures to stand beside ours: vLLM on the development GPU, the floors there, and the goals. Data only.

vLLM 0.24.0 (torch 2.11, FlashAttention 3, CUDA graphs), random weights, bf16, greedy, prefix caching off, one NVIDIA
H200 (read bandwidth 4.27 TB/s, bf16 products 796 TFLOP/s), prompts of 512 tokens, outputs of 256.
ROCm/ATOM's own figures are of its public dashboard.
"""

from typing import NamedTuple

VLLM = "vLLM 0.24.0"
MACHINE = "NVIDIA H200"
BANDWIDTH = 4.27e12  # bytes per second
FLOPS = 796e12  # bf16


class Served(NamedTuple):
    """Over HTTP, closed loop."""

    output_per_s: float
    ttft_ms: float  # median
    itl_ms: float  # 99th percentile


class Figures(NamedTuple):
    """`floor_ms`: active weights and KV read once at full bandwidth, one sequence."""

    token_ms: float
    floor_ms: float
    goal_ms: float
    offline: dict[int, float]  # sequences: output tokens/s
    goals: dict[int, float]  # sequences: times vLLM's
    prefill: float  # tokens/s, 64 prompts of 2048
    served: dict[int, Served]  # by concurrency


PEERS: dict[str, Figures] = {
    "Qwen3-0.6B": Figures(
        token_ms=1.76,
        floor_ms=0.28,
        goal_ms=0.75,
        offline={16: 7_320, 64: 18_603, 256: 23_169, 512: 27_297},
        goals={16: 2.0, 64: 2.0, 256: 2.0, 512: 2.0},
        prefill=376_572,
        served={1: Served(559, 13, 2.8), 64: Served(15_716, 170, 12), 256: Served(16_597, 410, 35)},
    ),
    "Llama-3.1-8B": Figures(
        token_ms=5.06,
        floor_ms=3.52,
        goal_ms=4.2,
        offline={16: 2_553, 64: 6_579, 256: 9_759, 512: 10_243},
        goals={16: 1.15, 64: 1.15, 256: 1.15, 512: 1.15},
        prefill=42_777,
        served={1: Served(200, 22, 5.5), 64: Served(6_505, 550, 20), 256: Served(9_648, 799, 195)},
    ),
    "Qwen3-30B-A3B": Figures(
        token_ms=4.26,
        floor_ms=1.55,
        goal_ms=2.3,
        offline={16: 1_139, 64: 1_936, 256: 8_113, 512: 10_137},
        goals={16: 2.0, 64: 2.0, 256: 1.2, 512: 1.2},
        prefill=68_306,
        served={},
    ),
}


class Published(NamedTuple):
    """What ROCm/ATOM has published for one GPU: random prompts and outputs of 0.8 to 1.0 times 1,024, fp8 KV."""

    model: str
    gpu: str
    date: str
    tokens_ms: dict[int, tuple[float, float]]  # concurrency: output tokens/s, mean ms per token of one stream


PUBLISHED_CONTEXT = 0.9 * (1024 + 512)  # mean tokens of a sequence over its output
ATOM = (
    Published("Llama-3.3-70B", "MI355X", "2026-08-10", {4: (263, 14.6), 64: (3030, 20.0), 256: (6122, 40.1)}),
    Published("gpt-oss-120b", "MI355X", "2026-05-24", {4: (868, 4.2), 64: (6037, 9.8), 256: (13595, 16.9)}),
)
