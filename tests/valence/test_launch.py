import os
import resource
import subprocess
import sys

import psutil

LAUNCH = [sys.executable, "-m", "valence.launch"]  # without -P, so that tests.* can be imported


def test_the_module_runs_as_main_with_its_arguments() -> None:
    script = "import sys, resource; print(sys.argv[1:], __name__, resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    command = [*LAUNCH, "SIGKILL", "0", "tests.valence.script", script, "--instance", "3"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    arguments, name, limit = answer.stdout.rsplit(maxsplit=2)
    assert (arguments, name) == (str([script, "--instance", "3"]), "__main__")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(limit) == (65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard)) or int(limit) > 65_536


def test_the_exit_status_is_the_modules() -> None:
    command = [*LAUNCH, "SIGKILL", "0", "tests.valence.script", "raise SystemExit(78)"]
    assert subprocess.run(command, check=False).returncode == 78


def test_a_full_disk_under_standard_error_ends_nobody() -> None:
    script = "import sys; print('x' * 9000, file=sys.stderr); sys.stderr.flush(); print('lives')"
    command = [*LAUNCH, "SIGKILL", "0", "tests.valence.script", script]
    with open("/dev/full", "w") as full:
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, check=True)
    assert answer.stdout == "lives\n"


def test_standard_error_still_tells() -> None:
    command = [*LAUNCH, "SIGKILL", "0", "tests.valence.script", "raise ValueError('broken \u00e4')"]
    answer = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert answer.returncode == 1
    assert "Traceback" in answer.stderr and answer.stderr.rstrip().endswith("ValueError: broken \u00e4")


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    command = [*LAUNCH, "SIGKILL", "999999999", "tests.valence.script", "print('ran')"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "the parent process is gone" in answer.stderr
    own = [*LAUNCH, "SIGKILL", str(os.getpid()), "tests.valence.script", "print('ran')"]
    assert subprocess.run(own, capture_output=True, text=True, check=True).stdout == "ran\n"


def test_it_dies_with_its_parent() -> None:
    """A parent that is killed cannot tell its children anything; the kernel does."""
    child = [*LAUNCH, "SIGKILL", "0", "tests.valence.script", "import time; print('up', flush=True); time.sleep(600)"]
    parent_script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen({child!r}, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent_script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child_process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    psutil.wait_procs([child_process], timeout=240)
    assert not child_process.is_running() or child_process.status() == psutil.STATUS_ZOMBIE
    assert os.getpid() != child_process.pid
