"""Runs the provider on a real AITER without ROCm: its own wrappers run, and note what they would have launched.

    python -m tests.services.worker.kernels.impl.aiter.contract SOURCE ARCH FOLDER

SOURCE is AITER's wheel or source tree, FOLDER an empty one to work in. Writes one line of JSON: "parameters", what each
function that we call takes; "runs", by implementation and case, the compiled ops with their arguments, or the reason
why the case is refused; "failed", what raised; "unnoticed" (gfx950), which keyword may be another without an error.
Stand-ins: the tools of ROCm that an import asks, the compiled modules, Triton's launches, pandas (for tables of tuned
shapes, which are left empty), torch's answers about the GPU.

With TRITON_INTERPRET=1 AITER's Triton kernels run, interpreted, and "compared" are the cases that they alone served:
each equals the op's meaning.
"""

import contextlib
import importlib
import importlib.abc
import importlib.util
import inspect
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
CORES = ("module_aiter_enum", "module_aiter_core")  # of the wheel, of later releases
UNITS = {"gfx942": 304, "gfx950": 256}
ROCMINFO = """#!/bin/sh
cat <<END
Agent 1
  Name:                    {arch}
  Device Type:             GPU
  Compute Unit:            {units}
END
"""
HALF = (torch.bfloat16, torch.float16)
TUNED = (
    "GEMM_BF16",
    "GEMM_A8W8",
    "GEMM_A8W8_BPRESHUFFLE",
    "GEMM_A8W8_BLOCKSCALE",
    "GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE",
    "GEMM_A4W4",
    "FMOE",
)
ENUMS = {
    "ActivationType": ("No", "Silu", "Gelu", "Swiglu", "Situv2"),
    "QuantType": ("No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128", "per_256x128"),
    "MlaVersion": ("V32", "V40"),
    "MxScaleRoundMode": ("RoundDown", "RoundUp", "Even", "Ceil"),
    "MxDtype": ("FP4_E2M1", "FP8_E4M3", "FP8_E4M3_FNUZ"),
}


class Noted:
    """What would have run, in order: compiled module, op, its arguments as text."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def __call__(self, module: str, op: str, arguments: Any) -> Any:
        self.calls.append([module, op, [described(value) for value in arguments]])
        return answer(op, tuple(arguments))


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"({', '.join(map(described, value))})" if isinstance(value, tuple | list) else repr(value)[:40]


def answer(op: str, arguments: tuple[Any, ...]) -> Any:
    """For the few ops whose result their wrapper uses. Numbers are never computed here."""
    if op in ("rmsnorm2d_fwd", "rms_norm"):
        return torch.zeros_like(arguments[0])
    if op in ("get_padded_m", "getPaddedM"):
        return arguments[0]
    if op.startswith("gemm_a8w8"):
        return next((x for x in arguments[4:] if isinstance(x, Tensor) and x.dtype in HALF), None)
    if op.endswith("workspace_size"):
        return 1024
    if op == "hipb_mm":
        return torch.zeros(len(arguments[0]), arguments[1].shape[1], dtype=arguments[0].dtype)
    if op == "mha_batch_prefill":
        return torch.zeros_like(arguments[0]), torch.zeros(0), torch.zeros(0), torch.zeros(2)
    if op in ("mha_varlen_fwd", "fmha_v3_varlen_fwd"):
        q, v = arguments[0], arguments[2]
        return q.new_zeros(*q.shape[:2], v.shape[2]), torch.zeros(0), torch.zeros(0), torch.zeros(2)
    return None


class Recorder(ModuleType):
    """Has any op that is asked of it. A docstring that starts so keeps AITER from comparing pybind signatures."""

    def __init__(self, name: str, noted: Noted) -> None:
        super().__init__(name)
        self.__dict__["_noted"] = noted

    def __getattr__(self, op: str) -> Any:
        if op.startswith("__"):
            raise AttributeError(op)

        def run(*arguments: Any, **keywords: Any) -> Any:
            return self._noted(self.__name__.rpartition(".")[2], op, [*arguments, *keywords.values()])

        run.__doc__ = "Members:"
        return run


class CompiledModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a recorder where AITER would import, or build, a compiled module."""

    def __init__(self, noted: Noted) -> None:
        self._noted = noted

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        last = name.rpartition(".")[2]
        compiled = last.startswith(("module_", "libmha")) or (last.startswith("mha_") and "_n" in last)
        return importlib.util.spec_from_loader(name, self) if compiled else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        last = spec.name.rpartition(".")[2]
        return core_module(last) if last in CORES else Recorder(spec.name, self._noted)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = "recorded"


def core_module(name: str) -> ModuleType:
    """Enumerations as pybind makes them, and the little that an import takes from there."""
    module: Any = ModuleType(name)
    for kind, members in ENUMS.items():
        first = -1 if kind == "ActivationType" else 0
        values = {member: Member(first + place) for place, member in enumerate(members)}
        made = type(kind, (Member,), {"__doc__": "Members:", "__members__": values, **values})
        setattr(module, kind, made)
    module.kDefaultMxScaleRoundMode = 1
    module.aiter_tensor_t = lambda *fields: SimpleNamespace(fields=fields)
    module._set_current_hip_stream = lambda stream: None
    return module  # type: ignore[no-any-return]


class Member(int):
    """Members:"""

    @property
    def value(self) -> int:
        return int(self)


EMPTY: dict[str, Callable[..., Any]] = {
    "to_dict": lambda *arguments: {},
    "to_list": list,
    "tolist": list,
}


class Rows:
    """A table of tuned shapes without rows, whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "to_csv":
            return lambda path, **options: Path(path).write_text("")
        return EMPTY.get(name, self)

    def __call__(self, *arguments: Any, **keywords: Any) -> "Rows":
        return self

    def __getitem__(self, key: Any) -> "Rows":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


def stand_in(arch: str, folder: Path, noted: Noted) -> None:
    """Before `import aiter`."""
    tools = folder / "bin"
    tools.mkdir()
    for name, text in (
        ("hipconfig", "#!/bin/sh\necho 7.2.0-0\n"),
        ("rocminfo", ROCMINFO.format(arch=arch, units=UNITS[arch])),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    for name in ("jit", "root", "triton"):
        (folder / name).mkdir()
    os.environ |= {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "AITER_JIT_DIR": str(folder / "jit"),
        "AITER_ROOT_DIR": str(folder / "root"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "AITER_LOG_LEVEL": "ERROR",
    }
    (folder / "tuned.csv").touch()
    os.environ |= {f"AITER_CONFIG_{kind}": str(folder / "tuned.csv") for kind in TUNED}
    sys.meta_path.insert(0, CompiledModules(noted))
    pandas: Any = ModuleType("pandas")
    pandas.__spec__ = ModuleSpec("pandas", None)
    pandas.read_csv = pandas.concat = pandas.DataFrame = lambda *arguments, **keywords: Rows()
    sys.modules.setdefault("pandas", pandas)
    stand_in_gpu(arch)
    _triton(arch, noted)


def stand_in_gpu(arch: str) -> None:
    properties = SimpleNamespace(gcnArchName=arch, name=arch, multi_processor_count=UNITS[arch], major=9, minor=4)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    for name in ("empty", "zeros", "ones", "tensor", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrappers allocate on the GPU that they believe in."""

    def call(*arguments: Any, **keywords: Any) -> Tensor:
        if str(keywords.get("device")).startswith("cuda"):
            keywords["device"] = "cpu"
        return make(*arguments, **keywords)

    return call


def _triton(arch: str, noted: Noted) -> None:
    """Kernels are noted, not compiled; who asks for the device's target is told."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("hip", arch, 64)))
    if INTERPRETS:
        from tests.services.worker.kernels.impl.triton.interpreter import correct

        correct()
        return

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        noted("triton", self.fn.__name__, [*arguments, *keywords.values()])

    triton.runtime.JITFunction.run = run
    triton.runtime.autotuner.Autotuner.run = lambda self, *arguments, **keywords: self.fn.run(
        *arguments, warmup=False, **keywords
    )


def unpack(source: Path, folder: Path) -> Path:
    """A folder to import from; of a wheel only what is imported."""
    if source.is_dir():
        return source
    with zipfile.ZipFile(source) as wheel:
        wanted = [
            name
            for name in wheel.namelist()
            if name.startswith(("aiter/", "aiter_meta/csrc/cpp_itfs/")) and not name.endswith((".csv", ".co"))
        ]
        wheel.extractall(folder / "source", wanted)
    return folder / "source"


def main(source: str, arch: str, work: str) -> None:
    folder, noted = Path(work), Noted()
    stand_in(arch, folder, noted)
    sys.path.insert(0, str(unpack(Path(source), folder)))
    _import_aiter(noted)

    # these import AITER's provider, which may look for its functions at once
    from benchmarks.aiter_signatures import declared
    from services.worker.kernels.impl.aiter import _host

    parameters: dict[str, Any] = {}
    for places in {function.places for function in declared()}:
        found = _host.find(places)
        parameters[places[0]] = found if isinstance(found, str) else [found[0], _host.parameters_of(*found)]
    report = {"parameters": parameters, **(compare(arch, noted) if INTERPRETS else drive(arch, noted))}
    print(json.dumps(report), flush=True)
    os._exit(0)  # the wheel's own exit handlers complain of what it registers twice


def drive(arch: str, noted: Noted) -> dict[str, Any]:
    """Every case in every dtype, with what it launches."""
    from services.worker.kernels.registry import find_impls
    from tests.services.worker.kernels.impl.aiter.cases import CASES
    from tests.services.worker.kernels.impl.aiter.hold import facts_of, in_layout, made

    runs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, impl in find_impls("aiter")[0].items():
        for case in CASES.get(name, ()):
            for dtype in (torch.bfloat16, torch.float16):
                label = f"{name} {case.name} {str(dtype).removeprefix('torch.')}"
                arguments = made(case, dtype, arch)
                facts = facts_of(impl, arguments, arch, dtype)
                if reason := impl.refuses(facts):
                    runs[label] = reason
                    continue
                noted.calls.clear()
                try:
                    impl.run(*in_layout(impl, arguments, impl.layout(facts)))
                except Exception as error:  # noqa: BLE001 whatever it is, the report has it
                    failed[label] = f"{type(error).__name__}: {error}"
                runs[label] = list(noted.calls)
    return {"runs": runs, "failed": failed, "unnoticed": unnoticed(arch) if arch == "gfx950" else []}


def unnoticed(arch: str) -> list[str]:
    from services.worker.kernels.registry import find_impls
    from tests.services.worker.kernels.impl.aiter.mutants import changed, mutants_of

    found = []
    for name, impl in find_impls("aiter")[0].items():
        for mutant, cases in mutants_of(impl, arch).items():
            if mutant.kind == "keyword":
                with changed(mutant.change):
                    try:
                        cases[0].got()
                    except (AssertionError, TypeError, RuntimeError):
                        continue
                found.append(f"{name}: {mutant}")
    return found


def compare(arch: str, noted: Noted) -> dict[str, Any]:
    """Where all is Triton's, the numbers are there."""
    from services.worker.kernels.registry import find_impls
    from tests.services.worker.kernels.impl.aiter.cases import CASES
    from tests.services.worker.kernels.impl.aiter.hold import Holder

    compared, failed = [], {}
    for name in ("paged_attention", "rope_kv_write"):
        for case in CASES[name]:
            noted.calls.clear()
            try:
                ran = Holder(None).run(find_impls("aiter")[0][name], case, arch, torch.bfloat16)
            except Exception as error:  # noqa: BLE001 the same
                if not noted.calls:
                    failed[f"{name} {case.name}"] = f"{type(error).__name__}: {error}"
            else:
                compared += [f"{name} {case.name}"] if ran and not noted.calls else []
    return {"compared": compared, "failed": failed}


def _import_aiter(noted: Noted) -> None:
    """Later releases call some ops through ctypes: the maker of their callers is replaced before they are made."""
    os.environ["AITER_AOT_IMPORT"] = "1"  # there only aiter.jit.core is imported at first
    package = importlib.import_module("aiter")
    core = importlib.import_module("aiter.jit.core")
    if not hasattr(core, "_ctypes_call"):
        return

    def make(function: Any, op: str, module: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            bound = inspect.signature(function).bind(*arguments, **keywords)
            return noted(module, op, list(bound.arguments.values()))

        return call

    core._ctypes_call = make
    os.environ["AITER_AOT_IMPORT"] = "0"
    importlib.reload(package)


if __name__ == "__main__":
    main(*sys.argv[1:])
