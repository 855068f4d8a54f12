"""AITER's Triton part alone, from a wheel or source tree, run through the provider and held against the ops' meanings.

    python -m tests.services.worker.kernels.impl.aiter.bare SOURCE ARCH FOLDER [OPS OR ARCHITECTURE,...]

What AITER_TRITON_ONLY=1 installs: `import aiter` gives nothing but the Triton modules. Without a GPU they are
interpreted (set TRITON_INTERPRET=1); a GPU of NVIDIA compiles them, while AITER believes that it sees ARCH. Writes one
line of JSON: by op, case, dtype and layout "passed", "wrong: ...", "failed: ...", "refused: ..." where Triton cannot
compile for this GPU, "not bound: ..." where the provider says that it cannot.
"""

import importlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from services.worker.kernels.layout import SHUFFLED, TOKENS
from services.worker.kernels.ops.moe_int4 import make_int4_moe_case
from services.worker.kernels.ops.moe_int4_whole import whole_case
from services.worker.kernels.ops.moe_mxfp4_paired import make_paired_case
from services.worker.kernels.ops.moe_mxfp8 import make_mxfp8_moe_case
from services.worker.kernels.ops.quantize_groups import make_groups_case
from services.worker.kernels.ops.quantize_rows import make_quantize_case
from services.worker.kernels.ops.rope import make_rope_case
from services.worker.kernels.real_cases import real_cases
from services.worker.kernels.registry import Bindings, Case, Facts, Impl, bind, find_impls
from services.worker.kernels.trial import try_case
from tests.services.worker.kernels.impl.aiter.cases import ATTENTION, CASES, paged
from tests.services.worker.kernels.impl.aiter.contract import INTERPRETS, UNITS, stand_in_gpu, unpack
from tests.services.worker.kernels.impl.aiter.fake import fp8_of
from tests.services.worker.kernels.impl.aiter.hold import facts_of, native
from tests.services.worker.kernels.impl.aiter.models import (
    BLOCK_TOKENS,
    COMMON,
    CONFIGS,
    generate,
    make_model,
    serve,
)
from tests.services.worker.kernels.impl.triton.hold import poisoned_allocations

LAUNCHED: Counter[str] = Counter()  # AITER's kernels that a GPU ran, by name
HALF = (torch.bfloat16, torch.float16)
AMD_ONLY = ("waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint", "instruction_sched_variant")
# Ops that are refused as a whole without the compiled part, since it alone knows weights in tiles.
PLAIN_WEIGHTS = ("row_scaled_linear", "block_scaled_linear")
SERVED = (
    *("rms_norm", "add_rms_norm", "norm_quantize_rows", "add_norm_quantize_rows", "rope", "rope_kv_write"),
    *("paged_attention", "linear", "add_linear", "norm_linear", "tensor_scaled_linear", *PLAIN_WEIGHTS),
    *("quantize_rows", "quantize_tensor", "quantize_groups", "silu_and_mul"),
    *("moe_mxfp4_paired", "moe_mxfp8", "moe_int4_whole"),
)
# Qwen3-0.6B, of a smaller vocabulary, with experts of gpt-oss
REAL = {
    "clamped": 1,
    "num_experts": 32,
    "top_k": 4,
    "expert_size": 2880,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "vocab_size": 32768,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rotary_dim": 128,
    "block_tokens": 16,
    "max_rows": 64,
    "step_tokens": 1024,
}


def small_numbers(dtype: torch.dtype) -> tuple[Any, ...]:
    """Their scale is far below 1."""
    x, *rest = make_quantize_case(5, 576).make(dtype)
    return x / 100, *rest


FEW = 2  # cases of an op that are interpreted: the smallest, but of what is slow there
INTERPRETED = {
    "rope": (make_rope_case(9, 1, 64, 64), make_rope_case(9, 1, 64, 32)),
    "rope_kv_write": (
        paged("fused", (2, 1, 64)),
        paged("normed", (2, 1, 64), normed=True),
        paged("partial", (2, 1, 64), rotary_dim=32),
    ),
    "paged_attention": tuple(case for case in ATTENTION if case.name in ("prompts", "window64")),
    "quantize_groups": (make_groups_case(3, 256, 128, True), make_groups_case(5, 512, 128, False)),
    "moe_mxfp4_paired": (
        make_paired_case(33, 4, 2, 64, 96, biased=True),
        make_paired_case(1, 8, 3, 256, 64),
        make_paired_case(5, 8, 4, 96, 32, biased=True),
    ),
    "moe_int4_whole": (
        whole_case(make_int4_moe_case(9, 4, 2, 128, 64, group=32)),
        whole_case(make_int4_moe_case(5, 4, 1, 96, 64, group=32, asymmetric=False)),
    ),
    "moe_mxfp8": (make_mxfp8_moe_case(17, 4, 2, 96, 64), make_mxfp8_moe_case(3, 8, 3, 64, 32)),
    "quantize_tensor": (make_quantize_case(5, 576), Case("small", small_numbers)),
}


def install(root: Path, arch: str) -> None:
    """`aiter` of `root` as a package without contents of its own, and what its Triton modules take from the rest."""
    for name in ("aiter", "aiter.ops", "aiter.jit", "aiter.jit.utils", "aiter.utility"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        owner, _, last = name.rpartition(".")
        if owner:
            setattr(sys.modules[owner], last, package)
    kinds = {kind: getattr(torch, f"float{kind[2:]}") for kind in ("fp16", "fp32")}
    eights = {"fp8": fp8_of(arch), "i8": torch.int8, "i32": torch.int32, "u32": torch.uint32}
    dtypes = ModuleType("aiter.dtypes")
    vars(dtypes).update(kinds | eights | {"bf16": torch.bfloat16, "fp4x2": torch.uint8, "fp8_e8m0": torch.uint8})
    sys.modules["aiter.dtypes"] = sys.modules["aiter.utility.dtypes"] = dtypes
    sys.modules["aiter"].dtypes = sys.modules["aiter.utility"].dtypes = dtypes  # type: ignore[attr-defined]
    chip: Any = ModuleType("aiter.jit.utils.chip_info")  # asks a tool of ROCm
    chip.get_gfx = chip.get_gfx_runtime = lambda: arch
    chip.get_cu_num = lambda: UNITS[arch]
    sys.modules[chip.__name__] = chip
    _triton(arch)


def _triton(arch: str) -> None:
    """AITER asks Triton which GPU it is on. Triton itself is told the truth."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    reported = GPUTarget("hip", arch, 64)
    if INTERPRETS:
        from triton.runtime.interpreter import InterpreterBuilder

        from tests.services.worker.kernels.impl.triton.interpreter import correct

        driver.set_active(SimpleNamespace(get_current_target=lambda: reported))
        correct()
        # AITER promises compilers what does not hold of zero: that a program's number or an unused stride is positive
        InterpreterBuilder.create_assume = lambda self, condition: None
        return
    active: Any = driver.active
    actual, launch = active.get_current_target, JITFunction.run

    def target() -> Any:
        return reported if sys._getframe(1).f_globals.get("__name__", "").startswith("aiter.") else actual()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """NVIDIA's backend refuses options that it does not know."""
        own = {parameter.name for parameter in self.params}
        for name in [name for name in AMD_ONLY if name in options and name not in own]:
            del options[name]
        if self.fn.__module__.startswith("aiter."):
            LAUNCHED[self.fn.__name__] += 1
        return launch(self, *arguments, grid=grid, warmup=warmup, **options)

    active.get_current_target = target
    JITFunction.run = run


def cases(impl: Impl[Any], device: torch.device, arch: str) -> Iterator[tuple[Case, torch.dtype, Facts, Impl[Any]]]:
    """Each case in each dtype and in each layout of pages that the kernels read, as that architecture has it."""
    own = CASES.get(impl.op.name, impl.op.cases)
    if device.type == "cpu":
        smallest = sorted((case for case in own if size_of(case)), key=size_of)[:FEW]
        wanted = [*INTERPRETED.get(impl.op.name, smallest)]
    else:
        wanted = [*own, *(() if impl.op.name in PLAIN_WEIGHTS else real_cases(impl.op, REAL, "cuda"))]
    for case in wanted:
        for dtype in HALF if device.type == "cuda" else HALF[:1]:
            made = _native(case.make, dtype, arch)
            facts = replace(facts_of(impl, made, arch, dtype), device=device.type)
            plain = impl.op.name not in PLAIN_WEIGHTS or made[2].dim() == 2
            for layout in (TOKENS, SHUFFLED) if impl.op.in_cache else (TOKENS,):
                if plain and (layout == TOKENS or takes_shuffled(impl.op.name, facts, made)):
                    laid = replace(impl, layout=lambda facts, layout=layout: layout)
                    yield Case(case.name, lambda dtype, make=case.make: _native(make, dtype, arch)), dtype, facts, laid


def size_of(case: Case) -> int:
    """How many numbers its arguments are; 0 where one is empty."""
    shapes = [tensor.numel() for tensor in case.make(torch.bfloat16) if isinstance(tensor, torch.Tensor)]
    return 0 if 0 in shapes else sum(shapes)


def _native(make: Any, dtype: torch.dtype, arch: str) -> tuple[Any, ...]:
    with native(arch):
        made: tuple[Any, ...] = make(dtype)
    return made


def takes_shuffled(op: str, facts: Facts, made: tuple[Any, ...]) -> bool:
    """Whether this release's kernels know such pages; a host without the compiled part never chooses them."""
    from services.worker.kernels.impl.aiter import _attention, rope_kv_write
    from services.worker.kernels.layout import suits

    fp8 = bool(facts.shapes["kv_fp8"])
    if not suits(SHUFFLED, facts.shapes["head_dim"], facts.shapes["block_tokens"], torch.int8 if fp8 else facts.dtype):
        return False
    if op == "paged_attention":
        return _attention.UNIFIED_SHUFFLED.missing() is None
    head_dim = facts.shapes["head_dim"]
    # only rotation and write in one: others call the compiled part
    whole = op == "rope_kv_write" and made[6] is None and made[1].shape[-1] == head_dim
    return (
        whole
        and not head_dim & (head_dim - 1)
        and not fp8
        and facts.dtype != torch.float16
        and rope_kv_write.ROTATE_WRITE.missing() is None
    )


def run(arch: str, device: torch.device, only: str = "") -> dict[str, dict[str, str]]:
    """By op and case how it went."""
    found: dict[str, dict[str, str]] = {}
    impls, reason = find_impls("aiter")
    assert impls, reason
    for name in SERVED:
        if not re.fullmatch(only or ".*", name):
            continue
        impl, results = impls[name], found.setdefault(name, {})
        for case, dtype, facts, laid in cases(impl, device, arch):
            label = f"{case.name} {str(dtype).removeprefix('torch.')} {laid.layout(facts) if impl.op.in_cache else ''}"
            refusal = None if name in PLAIN_WEIGHTS else impl.refuses(replace(facts, device="cuda"))
            how = f"not bound: {refusal}" if refusal else tried(laid, case, facts, device)
            results[label.strip()] = how
            print(f"{name} {label}: {how}", file=sys.stderr, flush=True)  # a compiler may end the process
    return found


def run_model(architecture: str, arch: str) -> dict[str, Any]:
    """How far logits in bf16 are from torch's in fp32, as a root of mean squares: this provider's, and torch's own."""
    config = COMMON | CONFIGS[architecture]
    shapes = {name: config[name] for name in ("head_dim", "hidden_size")} | {"block_tokens": BLOCK_TOKENS}
    shapes |= {"num_heads": config["num_attention_heads"], "num_kv_heads": config["num_key_value_heads"]}
    facts = Facts("cuda", arch, torch.bfloat16, shapes)
    bound, plain = bind(("aiter", "torch"), facts, finder=find_impls), bind(("torch",), Facts("cpu"))
    exact = _logits(architecture, plain, torch.float32)

    def error(bindings: Bindings) -> float:
        steps = _logits(architecture, bindings, torch.bfloat16, exact)
        return float((torch.cat(steps) - torch.cat(exact)).square().mean().sqrt())

    ops = [row.op for row in bound.table if row.provider == "aiter"]
    return {"ops": ops, "error": error(bound), "error_of_bf16": error(plain), "steps": len(exact)}


def _logits(
    architecture: str, bindings: Bindings, dtype: torch.dtype, forced: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """float32 [sampled rows, V] of each step: prompts, then rows that decode. `forced`: what is sampled from."""
    model, seen = make_model(architecture, bindings, dtype), []
    original = model.logits

    def logits(x: torch.Tensor) -> torch.Tensor:
        seen.append(original(x).float())
        return seen[-1] if forced is None else forced[len(seen) - 1]

    model.logits = logits  # type: ignore[method-assign]
    generate(serve(model, bindings, dtype), [[3, 4, 5, 6, 7], [8, 9]], 3, chunk=16)
    return seen


def tried(impl: Impl[Any], case: Case, facts: Facts, device: torch.device) -> str:
    from triton.errors import TritonError

    try:
        with poisoned_allocations():
            wrong = try_case(impl, case, facts, device)
    except (TritonError, RuntimeError, ValueError, TypeError, AssertionError, AttributeError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        cannot = isinstance(error, TritonError) or "PassManager" in str(error)
        return f"{'refused' if cannot else 'failed'}: {type(error).__name__}: {lines[-1].strip()[:200]}"
    return "passed" if wrong is None else f"wrong: {wrong}"


def main(source: str, arch: str, work: str, only: str = "") -> None:
    device = torch.device("cpu" if INTERPRETS else "cuda")
    os.environ["TRITON_CACHE_DIR"] = os.environ.get("TRITON_CACHE_DIR", f"{work}/triton")
    os.environ["AITER_TRITON_LOG_LEVEL"] = "ERROR"
    if INTERPRETS:
        stand_in_gpu(arch)
    else:
        torch.cuda.init()  # while torch still knows whose GPU it is: cases are made as if it were AMD's
    install(unpack(Path(source), Path(work)), arch)
    importlib.import_module("triton")
    models = [name for name in only.split(",") if name in CONFIGS]
    report = {name: run_model(name, arch) for name in models} if models else run(arch, device, only)
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
