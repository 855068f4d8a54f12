"""Compiles every Triton kernel of the worker for GPUs that are not there, and counts what the machine code uses.

The table is kept beside the kernels (RESOURCES): a change of a kernel shows its price in the same diff, and a test
compares a fresh compile with it. SOURCES says of which source each row is: what has not changed since need not be
compiled again. Needs Triton and no GPU. Callers: benchmarks/kernels.py and tests.
"""

import hashlib
import importlib
import json
import multiprocessing
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import TritonError

import services.worker.kernels.impl.triton as kernels

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}
LDS_LIMIT = {"gfx942": 64 << 10, "gfx950": 160 << 10, "sm_90": 227 << 10}  # bytes of one block
RESOURCES = Path(kernels.__path__[0], "resources.json")
SOURCES = "sources.json"  # beside the table
SAMPLE = 64  # of so many unchanged kernels one is compiled all the same
MATRIX_INSTRUCTION = re.compile(r"\bv_s?mfma\w*_|\bv_smfmac_|\bwgmma\.mma_async|\bmma\.sync")
TYPE = re.compile(r"(\*?(?:[iu](?:1|8|16|32|64)|fp(?:16|32|64)|bf16|fp8e\w+)|tensordesc<\w+\[[\d, ]+\]>)(:16)?")


class Report(NamedTuple):
    """Of one kernel for one target. Counts are per thread unless the name says otherwise."""

    kernel: str  # file/case
    target: str
    hot: bool  # runs in every decode step
    registers: int  # vector registers; on AMD with those of the matrix units
    spilled: int  # registers on AMD, bytes on NVIDIA
    scratch_bytes: int
    lds_bytes: int  # of a block
    matrix_instructions: int  # in the whole kernel's text
    binary_bytes: int


class Task(NamedTuple):
    """What another process needs to find a case again."""

    module: str
    case: int
    target: str


@cache
def cases(module: str) -> tuple[Any, ...]:
    """The AOT cases of one file under impl/triton."""
    return tuple(getattr(importlib.import_module(f"{kernels.__name__}.{module}"), "AOT", ()))


def tasks(targets: Sequence[str], only: str = "", quick: bool = False) -> list[Task]:
    """Every case for every target, `only` of files whose name has that in it. `quick`: for gfx950, whose code differs
    little from gfx942's, only the decode step's. Large ones come first, so that no process is left alone with one.
    """
    modules = sorted(entry.name for entry in pkgutil.iter_modules(kernels.__path__) if only in entry.name)
    found = [
        Task(name, index, target)
        for name in modules
        for index, case in enumerate(cases(name))
        for target in targets
        if target in (case.targets or targets) and not (quick and target == "gfx950" and not case.hot)
    ]
    return sorted(found, key=lambda task: -cases(task.module)[task.case].num_warps)


def make_source(case: Any, target: str) -> ASTSource:
    """The case as the compiler wants it; what depends on the target is set here."""
    signature = dict(case.signature)
    if "PDL" in signature:
        signature["PDL"] = target == "sm_90"
    if missing := set(case.kernel.arg_names) ^ set(signature):
        raise ValueError(
            f"{case.name}: the signature and {case.kernel.__name__} differ in {', '.join(sorted(missing))}"
        )
    types, constants, hints = {}, {}, {}
    for place, parameter in enumerate(case.kernel.params):
        value = signature[parameter.name]
        match = None if parameter.is_constexpr or not isinstance(value, str) else TYPE.fullmatch(value)
        if match is None:
            types[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        # the CDNA3 generation has another form of eight bits than all after it
        types[parameter.name] = match[1].replace("e4nv", "e4b8") if target == "gfx942" else match[1]
        if match[2]:
            hints[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(case.kernel, types, constants, hints)


def compile_case(case: Any, target: str, name: str = "") -> Report:
    """Raises what the compiler raises. `name`: how the table calls it."""
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if target == "sm_90" and "PDL" in case.signature:
        options["launch_pdl"] = True
    knobs.compilation.disable_line_info = True  # paths of this checkout, in the binary
    knobs.nvidia.dump_ptxas_log = True
    with redirect_stdout(StringIO()) as log:
        compiled = triton.compile(make_source(case, target), target=TARGETS[target], options=options)
    is_amd = TARGETS[target].backend == "hip"
    text = compiled.asm["amdgcn" if is_amd else "ptx"]
    registers, spilled, scratch = _amd_counts(text) if is_amd else _nvidia_counts(text, log.getvalue())
    return Report(
        kernel=name or case.name,
        target=target,
        hot=case.hot,
        registers=registers,
        spilled=spilled,
        scratch_bytes=scratch,
        lds_bytes=compiled.metadata.shared,
        matrix_instructions=len(MATRIX_INSTRUCTION.findall(text)),
        binary_bytes=len(compiled.asm["hsaco" if is_amd else "cubin"]),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's output has no {pattern}")
    return int(found[1])


def _amd_counts(assembly: str) -> tuple[int, int, int]:
    """From the code object's metadata, which the assembly ends with."""
    fields = (r"\.vgpr_count:\s+(\d+)", r"\.vgpr_spill_count:\s+(\d+)", r"\.private_segment_fixed_size:\s+(\d+)")
    registers, spilled, scratch = (_number(field, assembly) for field in fields)
    return registers, spilled, scratch


def _nvidia_counts(ptx: str, log: str) -> tuple[int, int, int]:
    """Triton can print what its assembler says; which is asked again if Triton's cache had the kernel."""
    if "registers" not in log:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "kernel.ptx")
            source.write_text(ptx)
            command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(source), "-o", f"{folder}/kernel.cubin"]
            log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = _number(r"Used (\d+) registers", log)
    return registers, _number(r"(\d+) bytes spill stores", log), _number(r"(\d+) bytes stack frame", log)


def _compile(task: Task) -> Report | str:
    """The report, or what the compiler said: Triton's own errors do not survive the way to another process."""
    case = cases(task.module)[task.case]
    name = f"{task.module}/{case.name}"
    try:
        return compile_case(case, task.target, name)
    except (TritonError, RuntimeError, ValueError, KeyError) as error:
        return f"{name} for {task.target}: {type(error).__name__}: {error}"


def compile_all(
    todo: Sequence[Task], processes: int, done: Callable[[int, int], None]
) -> tuple[list[Report], list[str]]:
    """Reports in the table's order, and what did not compile. `done(finished, all)` is called after each."""
    if knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    reports, failures = [], []
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for number, future in enumerate(as_completed([pool.submit(_compile, task) for task in todo]), 1):
            found = future.result()
            if isinstance(found, Report):
                reports.append(found)
            else:
                failures.append(found)
            done(number, len(todo))
    return sorted(reports, key=lambda report: (report.kernel, report.target)), sorted(failures)


def table_text(reports: Sequence[Report]) -> str:
    """JSON with one kernel and target a line, so that diffs are read."""
    rows = ",\n".join("  " + json.dumps(report._asdict()) for report in reports)
    return f'{{"triton": "{triton.__version__}", "kernels": [\n{rows}\n]}}\n'


def read_table(text: str) -> tuple[str, list[Report]]:
    """Triton's version, and the rows."""
    content = json.loads(text)
    return content["triton"], [Report(**row) for row in content["kernels"]]


def merge(reports: Sequence[Report], text: str, only: str) -> list[Report]:
    """The table of `text` with new rows for the files that `only` selects."""
    version, kept = read_table(text)
    if version != triton.__version__:
        raise SystemExit(
            f"the table is Triton {version}'s, this is {triton.__version__}: renew all of it, or install that"
        )
    rest = [report for report in kept if only not in report.kernel.split("/")[0]]
    return sorted([*rest, *reports], key=lambda report: (report.kernel, report.target))


def fingerprint(task: Task, row: Report) -> str:
    """Of all that the compiler is given for a row, and of the row itself."""
    case = cases(task.module)[task.case]
    given = (triton.__version__, make_source(case, task.target).hash(), case.num_warps, case.num_stages)
    return hashlib.sha256(repr((*given, *row)).encode()).hexdigest()[:12]


def _key(kernel: str, target: str) -> str:
    return f"{kernel} {target}"


def _by_key(todo: Sequence[Task]) -> dict[str, Task]:
    return {_key(f"{task.module}/{cases(task.module)[task.case].name}", task.target): task for task in todo}


def read_sources(path: Path) -> dict[str, str]:
    """Fingerprints by kernel and target, of the table at `path`."""
    file = path.with_name(SOURCES)
    sources: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    return sources


def unchanged(todo: Sequence[Task], path: Path = RESOURCES) -> tuple[list[Report], list[Task]]:
    """Rows of the table that still are of their source, and what is to be compiled: all else, and some of them."""
    sources = read_sources(path)
    kept: list[Report] = []
    rest = _by_key(todo)
    for row in read_table(path.read_text())[1]:
        key = _key(row.kernel, row.target)
        if key in rest and sources.get(key) == fingerprint(rest[key], row):
            kept.append(row)
    kept = [row for number, row in enumerate(kept) if number % SAMPLE]
    for row in kept:
        del rest[_key(row.kernel, row.target)]
    compiled = set(rest.values())
    return kept, [task for task in todo if task in compiled]


def write(path: Path, reports: Sequence[Report], todo: Sequence[Task], only: str = "") -> None:
    """The table, or what `only` selects of it, and the fingerprints of `reports`, which `todo` has become."""
    merging = bool(only) and path.exists()
    rows = merge(reports, path.read_text(), only) if merging else list(reports)
    known = {_key(row.kernel, row.target) for row in rows}
    sources = {key: text for key, text in read_sources(path).items() if key in known} if merging else {}
    tasks_of = _by_key(todo)
    for row in reports:
        key = _key(row.kernel, row.target)
        sources[key] = fingerprint(tasks_of[key], row)
    path.write_text(table_text(rows))
    path.with_name(SOURCES).write_text(json.dumps(sources, indent=0, sort_keys=True) + "\n")


def violations(reports: Sequence[Report]) -> Iterator[str]:
    """What no change may bring: spills in a decode step's kernel, and blocks that do not fit."""
    for report in reports:
        place = f"{report.kernel} on {report.target}"
        if report.hot and report.spilled:
            yield f"{place} spills ({report.spilled})"
        if report.lds_bytes > LDS_LIMIT[report.target]:
            yield f"{place} takes {report.lds_bytes} bytes of LDS, and there are {LDS_LIMIT[report.target]}"
