"""What `valence doctor` says: findings from the facts about a host. Pure, so that hosts we do not have are tests.

An error keeps a model from being served as it should be; a warning does not. doctor_host.py gathers the facts,
doctor_ops.py adds the table of ops, doctor_display.py shows both to people.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from services.worker.devices import Device

GIB = 2**30
FILES = 65_536  # as launch.py asks for
SHM_GIB, CACHE_GIB = 1.0, 20.0  # a build of all of AITER's modules takes about as much
SERVED = ("gfx942", "gfx950")
UNLIMITED = -1


class Finding(NamedTuple):
    level: Literal["error", "warning"]
    what: str
    do: str


class Limits(NamedTuple):
    """Of this process; UNLIMITED, or numbers. Sizes in bytes."""

    files: int  # the hard limit: the soft one is raised at start
    locked: int
    shm: int


class Node(NamedTuple):
    """A device file that a worker opens."""

    path: str
    mode: str
    owner: str  # user:group
    group: int
    usable: bool


class Cache(NamedTuple):
    """One folder of compiled kernels."""

    name: str
    path: str
    size: int
    files: int
    note: str = ""


class OpRow(NamedTuple):
    """One row of the table, with what the self-test said."""

    op: str
    provider: str
    reason: str
    tested: str


@dataclass(frozen=True)
class Host:
    """What `examine` found."""

    system: dict[str, str]
    versions: dict[str, str]  # empty: not there
    devices: Sequence[Device] = ()
    seen: int = 0  # GPUs that torch sees
    limits: Limits = field(default=Limits(UNLIMITED, UNLIMITED, 1 << 40))
    nodes: Sequence[Node] = ()
    groups: Sequence[str] = ()
    caches: Sequence[Cache] = ()
    cache_free: int = 0
    cache_trouble: str = ""
    stale: Sequence[str] = ()
    run_dir: str = ""
    run_dir_trouble: str = ""
    model: str = ""
    ops: Sequence[OpRow] = field(default=())
    ops_trouble: str = ""

    @property
    def amd(self) -> list[Device]:
        return [device for device in self.devices if device.vendor == "amd"]


def judge(host: Host) -> list[Finding]:
    """What is wrong, the worst first."""
    found = [*_of_devices(host), *_of_versions(host), *_of_limits(host), *_of_folders(host), *_of_ops(host)]
    return sorted(found, key=lambda finding: finding.level != "error")


def _of_devices(host: Host) -> Iterator[Finding]:
    missing = [node for node in host.nodes if not node.usable]
    if missing:
        names = ", ".join(node.path for node in missing[:4]) + (" ..." if len(missing) > 4 else "")
        groups = sorted({f"{_name(node)} ({node.group})" for node in missing})
        numbers = " ".join(f"--group-add {node.group}" for node in {n.group: n for n in missing}.values())
        yield Finding(
            "error",
            f"this user may not open {names}",
            f"be in group {', '.join(groups)}: `usermod -aG {_name(missing[0])} $USER` and log in again; in a "
            f"container `{numbers}`, which must be the host's numbers",
        )
    lost = [device for device in host.devices if device.trouble and "missing" in device.trouble]
    if lost and len(lost) == len(host.devices):
        yield Finding(
            "error",
            f"the driver lists {len(lost)} GPUs, and {lost[0].trouble}",
            "in a container: `--device /dev/kfd --device /dev/dri`; on a host: `modprobe amdgpu`",
        )
    usable = [device for device in host.devices if not device.trouble]
    if len(modes := {device.mode for device in usable}) > 1:
        yield Finding(
            "warning",
            f"GPUs are parted in different ways ({', '.join(sorted(modes))}): workers are not alike",
            "`amd-smi set --compute-partition SPX` for all, or choose GPUs with ROCR_VISIBLE_DEVICES",
        )
    for arch in sorted({device.arch for device in usable if device.vendor == "amd"} - {*SERVED, ""}):
        yield Finding(
            "warning",
            f"{arch} is no architecture that AITER serves; Triton's and torch's kernels run there untested",
            f"use {' or '.join(SERVED)}: MI300X, MI325X, MI350X, MI355X",
        )
    if usable and not host.seen and not host.ops_trouble:
        yield Finding(
            "error",
            f"torch {host.versions.get('torch')} sees none of {len(usable)} GPUs",
            "install a torch that is built for them: " + _torch_for(usable[0]),
        )


def _torch_for(device: Device) -> str:
    if device.vendor == "nvidia":
        return "pip's default build"
    return (
        "`pip install torch --index-url https://download.pytorch.org/whl/rocmX.Y`, or start from rocm/pytorch's image"
    )


def _of_versions(host: Host) -> Iterator[Finding]:
    gpus = [device for device in host.devices if not device.trouble]
    if gpus and not host.versions.get("triton"):
        yield Finding(
            "error", "Triton is not installed: its kernels would be torch's", "it comes with torch's GPU builds"
        )
    if host.amd and not host.versions.get("aiter"):
        yield Finding(
            "warning",
            "AITER is not installed: Triton's kernels serve what it would",
            "use the worker's image, whose AITER is pinned (docs/rocm.md)",
        )
    if host.amd and host.versions.get("rocm", "").startswith("7.2.0"):
        yield Finding(
            "warning",
            "ROCm 7.2.0 crashes all-reduce in captured graphs (ROCm/aiter PR 3290)",
            "use another release of ROCm; with this one AITER's all-reduce is refused",
        )


def _of_limits(host: Host) -> Iterator[Finding]:
    files, locked, shm = host.limits
    if files != UNLIMITED and files < FILES:
        yield Finding(
            "warning",
            f"at most {files:,} open files per process: each open request is one",
            f"`ulimit -Hn {FILES}`, or --ulimit nofile={FILES} for a container",
        )
    if host.amd and locked != UNLIMITED:
        yield Finding(
            "warning",
            f"at most {size_text(locked)} may be locked in memory: buffers that GPUs read need more",
            "`ulimit -l unlimited`, or --ulimit memlock=-1 for a container",
        )
    if len(host.devices) > 1 and shm < SHM_GIB * GIB:
        yield Finding(
            "warning",
            f"/dev/shm has {size_text(shm)}: collectives among GPUs need more",
            "--shm-size 8g, or --ipc host, for a container",
        )


def _of_folders(host: Host) -> Iterator[Finding]:
    if host.cache_trouble:
        yield Finding(
            "warning",
            f"compiled kernels cannot be kept ({host.cache_trouble}): every start compiles them",
            "set worker.cache_dir to a folder of this user, in a container on a volume",
        )
    elif host.amd and host.cache_free < CACHE_GIB * GIB:
        yield Finding(
            "warning",
            f"{size_text(host.cache_free)} are free for kernels; a full cache of AITER's takes {CACHE_GIB:.0f} GiB",
            "set worker.cache_dir to a larger disk",
        )
    if host.stale:
        yield Finding(
            "warning",
            f"locks of builds that are dead: {len(host.stale)}, such as {host.stale[0]}",
            "nothing: the next start removes them",
        )
    if host.run_dir_trouble:
        yield Finding("error", host.run_dir_trouble, "set links.run_dir to a folder of this user")


def _of_ops(host: Host) -> Iterator[Finding]:
    if host.ops_trouble:
        yield Finding("error", host.ops_trouble, "see what it says; `valence models` lists what can be served")
    failed = sorted({part for row in host.ops for part in dropped(row)})
    for what in failed:
        yield Finding(
            "error",
            what,
            "it is not used: the next provider serves. Report it with `valence doctor --json`, or try another "
            "release of that library",
        )


FAILED = ("ends by", "ends with status", "hangs", "wrong in case", "raises", "cannot be imported: it")


def dropped(row: OpRow) -> Iterator[str]:
    """Providers that a self-test dropped for this op, from the table's reason."""
    for part in row.reason.split("; "):
        provider, _, why = part.partition(": ")
        if why.startswith("cannot be imported: it"):
            yield f"{provider} {why}"
        elif why.startswith(FAILED):
            yield f"{row.op} by {provider} {why}"


def document(host: Host, findings: Sequence[Finding]) -> dict[str, Any]:
    """For programs: plain values only."""
    told = {
        name: value for name, value in vars(host).items() if name not in ("devices", "nodes", "caches", "ops", "limits")
    }
    return {
        "ok": not any(finding.level == "error" for finding in findings),
        "findings": [finding._asdict() for finding in findings],
        **told,
        "groups": list(host.groups),
        "stale": list(host.stale),
        "limits": host.limits._asdict(),
        "devices": [{**asdict(device), "links": [link._asdict() for link in device.links]} for device in host.devices],
        **{name: [row._asdict() for row in getattr(host, name)] for name in ("nodes", "caches", "ops")},
    }


def _name(node: Node) -> str:
    return node.owner.partition(":")[2]


def size_text(number: int) -> str:
    """`3.2 GiB`, `12 MiB`; `any` for no limit."""
    if number == UNLIMITED:
        return "any"
    if number >= GIB:
        return f"{number / GIB:.0f} GiB" if number >= 10 * GIB else f"{number / GIB:.1f} GiB"
    return f"{number / 2**20:.0f} MiB" if number >= 2**20 else f"{number / 2**10:.0f} KiB"
