"""In a process of its own, where nothing is interpreted, with a driver that says what a GPU would."""

import os
import subprocess
import sys

PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from services.worker.kernels.impl.triton import _ahead, _builds, _gate, _norm, rms_norm, silu_and_mul


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


driver.set_active(Driver())
_builds.watch()
x, weight = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)


def launch():
    rms_norm.IMPL.run(x, weight, 1e-5)
    rms_norm.IMPL.run(x, weight, 1e-5)
    silu_and_mul.IMPL.run(x)


assert _ahead._same_device() == ()
torch.cuda.is_initialized, torch.cuda.current_device = lambda: True, lambda: 3
assert _ahead._same_device() == (torch.cuda.set_device, (3,))
torch.cuda.is_initialized = lambda: False
assert _ahead.is_first()
with _ahead.collect() as asked:
    launch()
assert _ahead.is_first()
assert len(asked) == 2 and sum(_builds.COUNTS.values()) == 0, (len(asked), _builds.COUNTS)
assert _norm.norm_kernel.hash and _gate.gate_kernel.hash, "keys are made in the order of launches, not by the threads"
reports = []
asked.build(2, lambda done, total: reports.append((done, total)))
assert reports == [(1, 2), (2, 2)] and sum(_builds.COUNTS.values()) == 2, (reports, _builds.COUNTS)
assert sorted(_builds.NEWEST) == ["gate_kernel", "norm_kernel"], _builds.NEWEST
assert not _ahead.is_first()
with _ahead.collect() as again:
    try:
        launch()
    except AttributeError as error:  # a kernel that is there is launched, which this driver cannot
        print("launched:", error)
assert len(again) == 0
"""


def test_kernels_are_noted_then_compiled_then_launched(tmp_path: object) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("launched:")
