"""The process that tries kernels out: `python -m services.worker.self_test_child FD`, started by self_test.py.

Reads one Job from its standard input, imports the providers, binds the ops and runs their cases; writes a line to FD
before and after everything that may end or stop it, so that the parent knows what did. Nothing here outlives the
parent. A failure on a GPU may leave the GPU's context broken, so the process ends after it (AGAIN) and another one goes
on.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from services.worker.kernels import registry
from services.worker.kernels.real_cases import CAPTURED, may_differ, real_cases, sizes_of
from services.worker.kernels.registry import BindError, Case, Facts, Impl
from services.worker.kernels.trial import try_captured, try_case
from services.worker.self_test import AGAIN, PR_SET_PDEATHSIG, Begun, Job, Verdict, finder_without

IMPORT = "import"
NOTHING = Begun("", "", "")  # from here on nothing of a provider's runs
# What a call of a kernel ends with where it cannot run.
FAULTS = (ImportError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError, AssertionError)
Tell = Callable[[msgspec.Struct], None]


def run(job: Job, tell: Tell) -> int:
    """All that is not known yet; returns the exit status."""
    device = torch.device(job.device)
    facts = job.facts()
    verdicts = list(job.verdicts)
    for provider in job.priority:
        if provider != "torch" and not any(v.provider == provider and not v.op for v in verdicts):
            tell(Begun("", provider, IMPORT))
            registry.find_for(facts, provider)
            verdicts.append(Verdict("", provider, ""))
            tell(verdicts[-1])
    while True:
        finder = finder_without(facts, verdicts)
        try:
            table = registry.bind(job.priority, facts, finder=finder).table
        except BindError:
            return 0  # the parent's own binding will say what is missing
        known = {(verdict.op, verdict.provider) for verdict in verdicts}
        pending = [row for row in table if row.provider != "torch" and (row.op, row.provider) not in known]
        if not pending:
            return 0
        for row in pending:
            impl = finder(row.provider)[0][row.op]
            verdict, broken = judge(impl, facts, device, job, tell)
            verdicts.append(verdict)
            tell(verdict)
            if broken:
                return AGAIN


def judge(impl: Impl[Any], facts: Facts, device: torch.device, job: Job, tell: Tell) -> tuple[Verdict, bool]:
    """All cases of one implementation; and whether the process should go on in another one."""
    op, name = impl.op, impl.op.name
    if facts.dtype not in op.tolerances:
        facts = Facts(facts.device, facts.arch, torch.float32, facts.shapes)  # an op of whole numbers, or of fp32 sums
        if impl.refuses(facts) is not None:
            return Verdict(name, impl.provider, ""), False
    cases = real_cases(op, job.shapes, facts.device)
    for case in cases:
        started: list[str] = []  # what of the kernel's own has begun

        def begin(started: list[str] = started, case: Case = case) -> None:
            started.append(case.name)
            tell(Begun(name, impl.provider, case.name))

        tell(NOTHING)
        try:
            reason = try_case(impl, case, facts, device, may_differ(op), begin)
            if reason is None and job.captures and name in CAPTURED and is_decode(case, job):
                tell(Begun(name, impl.provider, f"{case.name} captured"))
                reason = try_captured(impl, case, facts, device)
                reason = reason and f"replayed from a graph: {reason}"
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue  # the meaning needs more memory than the kernel does
        except FAULTS as error:
            if not started:
                raise  # a device that others have, a meaning that fails: nothing was learned about the kernel
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            return Verdict(name, impl.provider, f"raises {text} in case {case.name}", len(cases)), device.type != "cpu"
        if reason is not None:
            return Verdict(name, impl.provider, f"wrong in case {case.name}: {reason}", len(cases)), False
    return Verdict(name, impl.provider, "", len(cases)), False


def is_decode(case: Case, job: Job) -> bool:
    """Whether the case is of a size that decode steps have."""
    decode = {str(rows) for rows in sizes_of(job.shapes, job.device).decode}
    return case.name.partition("x")[0].partition("of")[0].removeprefix("decode") in decode


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    lines = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    os.set_inheritable(lines.fileno(), False)  # not for compilers
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)

    def tell(message: msgspec.Struct) -> None:
        lines.write(msgspec.json.encode(message) + b"\n")

    if job.device != "cpu":
        torch.cuda.set_device(0 if job.device == "cuda" else torch.device(job.device))
    status = run(job, tell)
    lines.flush()
    os._exit(status)  # no library's clean-up: what it may do, it may also hang or fault in


if __name__ == "__main__":
    main()
