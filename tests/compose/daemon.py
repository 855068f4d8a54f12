"""A Docker daemon, a Compose and a base image for the tests that start containers, or why there are none.

What is there is used: DOCKER_HOST, the system's daemon, PYTHON_BASE. Otherwise root starts a daemon of its own in a
folder, and where no registry answers the base image is made by debootstrap, with this host's way to PyPI. The folder is
temporary, or COMPOSE_TEST_DATA, an empty one at first: with its images the next run starts where this one has built.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from valence import bootstrap

START_S = 60.0
LOCAL_BASE = "valence-test-base"
DEFAULT_BASE = "docker.io/library/python:3.12-slim-bookworm"  # the Dockerfile's
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
BUNDLE = Path("etc/ssl/certs/ca-certificates.crt")


class Unavailable(Exception):
    """Why no container can be started here. Not for what goes wrong once there is a daemon: that is a failure."""


def run(*command: str, env: dict[str, str] | None = None, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Raises AssertionError with the program's own words."""
    answer = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if check and answer.returncode:
        last = "\n".join((answer.stdout + answer.stderr).splitlines()[-25:])
        raise AssertionError(f"{' '.join(command)} ended with status {answer.returncode}:\n{last}")
    return answer


@contextlib.contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """The environment in which docker reaches a daemon. Raises Unavailable."""
    if not shutil.which("docker"):
        raise Unavailable("there is no docker; on Debian: apt-get install docker.io docker-compose")
    if run("docker", "info", check=False).returncode == 0:
        yield dict(os.environ)
        return
    program = shutil.which("dockerd") or shutil.which("dockerd", path="/usr/sbin:/sbin")
    if not program or os.geteuid() != 0:
        raise Unavailable("no Docker daemon answers, and one can be started only by root where dockerd is installed")
    with tempfile.TemporaryDirectory(prefix="vd-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        data = os.environ.get("COMPOSE_TEST_DATA") or f"{folder}/data"
        socket = f"unix://{folder}/sock"
        command = [program, "--data-root", data, "--exec-root", f"{folder}/exec"]
        command += ["--pidfile", f"{folder}/pid", "-H", socket]
        environment = dict(os.environ) | {"DOCKER_HOST": socket}
        with (
            open(folder / "log", "wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process,
        ):
            try:
                _wait_for(process, environment, folder / "log")
                yield environment
            finally:
                process.terminate()


def _wait_for(process: "subprocess.Popen[bytes]", environment: dict[str, str], log: Path) -> None:
    end_s = time.monotonic() + START_S
    while run("docker", "info", env=environment, check=False).returncode:
        if process.poll() is not None or time.monotonic() > end_s:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            raise Unavailable(f"dockerd cannot be started here:\n{last}")
        time.sleep(0.2)


def compose(environment: dict[str, str]) -> list[str]:
    """Docker's plugin, or the older program. Raises Unavailable."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and run(*command, "version", env=environment, check=False).returncode == 0:
            return command
    raise Unavailable("neither `docker compose` nor docker-compose is installed")


def base_image(environment: dict[str, str]) -> str:
    """PYTHON_BASE if set, else the Dockerfile's where a registry has it, else one made here. Raises Unavailable."""
    if chosen := environment.get("PYTHON_BASE"):
        return chosen
    if run("docker", "image", "inspect", LOCAL_BASE, env=environment, check=False).returncode == 0:
        return LOCAL_BASE
    if run("docker", "pull", "-q", DEFAULT_BASE, env=environment, check=False).returncode == 0:
        return DEFAULT_BASE
    if not shutil.which("debootstrap") or os.geteuid() != 0:
        raise Unavailable(f"{DEFAULT_BASE} cannot be pulled, and debootstrap, which makes a base, needs root")
    with tempfile.TemporaryDirectory(prefix="vb-") as name:
        root = Path(name)
        made = run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root), check=False)
        if made.returncode:
            raise Unavailable(f"no base image: {DEFAULT_BASE} cannot be pulled, and debootstrap: {made.stdout[-500:]}")
        _give_pip(root)
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
            command = ["docker", "import", "-", LOCAL_BASE]
            subprocess.run(command, stdin=archive.stdout, env=environment, check=True, capture_output=True)
    return LOCAL_BASE


def _give_pip(root: Path) -> None:
    """This host's certificates, package index and build of torch, as pip's variables tell."""
    certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or f"/{BUNDLE}"
    shutil.copy(certificates, root / BUNDLE)
    lines = ["[global]", f"cert = /{BUNDLE}", "timeout = 180"]
    if index := os.environ.get("PIP_INDEX_URL"):
        lines.append(f"index-url = {index}")
    found = [Path(each) for each in os.environ.get("PIP_FIND_LINKS", "").split() if Path(each).is_dir()]
    wheels = [wheel for folder in found for wheel in folder.glob("torch-*+cpu-*.whl")]
    if wheels:
        (root / "wheels").mkdir()
        lines.append("find-links = /wheels")
    for wheel in wheels:
        shutil.copy(wheel, root / "wheels")
    (root / "etc/pip.conf").write_text("\n".join(lines) + "\n")


def torch_index() -> str:
    """The CPU build's, or the usual one again where that does not answer: pip would try it for minutes."""
    return bootstrap.CPU_INDEX if bootstrap.examine().cpu_index else "https://pypi.org/simple"


def limits() -> dict[str, str]:
    """The most that may be asked for where the daemon cannot raise what it has."""
    import resource

    def hard(kind: int, wanted: int) -> str:
        have = resource.getrlimit(kind)[1]
        may_raise = "CapEff" in (status := Path("/proc/self/status").read_text()) and bool(
            int(status.split("CapEff:")[1].split()[0], 16) & 1 << 24  # CAP_SYS_RESOURCE
        )
        return str(wanted if may_raise or have == resource.RLIM_INFINITY else have)

    return {
        "OPEN_FILES": hard(resource.RLIMIT_NOFILE, 65_536),
        "MEMLOCK": hard(resource.RLIMIT_MEMLOCK, -1),
    }


def words_of(reason: str) -> str:
    """For a terminal: a run that proves nothing shall not look like one that does."""
    line = "!" * 100
    return f"\n{line}\nNO CONTAINER WAS STARTED, so compose.yaml was not proved to work:\n{reason}\n{line}"
