"""The GPUs of this host, read from the kernel's files: no torch, no ROCm, no driver library. Pure but for the reading.

AMD: the topology of amdgpu's compute driver (`/sys/class/kfd`), whose nodes in their order are ROCr's indices, and the
PCI device of each. A partition (CPX, DPX ...) is a node of its own; the PCI device is that of the whole GPU. A node
that this process may not use (a container got another one) cannot be read, or its render device not opened: ROCr does
not count it. NVIDIA: `/proc/driver/nvidia`. Where these files are missing, device_tools.py asks amd-smi and others.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

PCI = "sys/bus/pci/devices"
KFD = "sys/class/kfd/kfd/topology/nodes"
NVIDIA = "proc/driver/nvidia/gpus"
XGMI, FRAME_BUFFERS = 11, (1, 2)  # link and heap types of the KFD
PRODUCTS = {  # by PCI device id, where the board does not tell its name (pci.ids)
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x74B5: "AMD Instinct MI300X VF",
    0x74B9: "AMD Instinct MI325X VF",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}


class Link(NamedTuple):
    """To another GPU."""

    device: int  # its index
    kind: str  # "XGMI" or "PCIe"
    weight: int  # cost as the kernel counts it: less is nearer
    bandwidth_mb: int  # MB/s at most; 0: not told


@dataclass(frozen=True)
class Device:
    """`index` counts as ROCr or CUDA do, among what this process may use; -1: it may not, and `trouble` says why."""

    index: int
    vendor: Literal["amd", "nvidia"]
    product: str
    arch: str = ""  # "gfx942", "sm_90"; empty: not told
    compute_units: int = 0
    memory_bytes: int = 0
    pci: str = ""  # 0000:05:00.0, of the whole GPU
    partition: int = 0  # which part of the GPU
    compute_partition: str = ""  # SPX, DPX, QPX, CPX
    memory_partition: str = ""  # NPS1, NPS2, NPS4
    numa_node: int = -1
    cpus: tuple[int, ...] = ()  # of that NUMA node
    render: str = ""  # /dev/dri/renderD128
    links: tuple[Link, ...] = field(default=())
    trouble: str = ""

    @property
    def mode(self) -> str:
        """`CPX/NPS4`; empty if the GPU cannot be parted."""
        return "/".join(part for part in (self.compute_partition, self.memory_partition) if part)


def read_devices(root: Path = Path("/")) -> list[Device]:
    """AMD's, else NVIDIA's: a host with both serves by the former. Those that cannot be used come last."""
    found = list(_read_amd(root)) or list(_read_nvidia(root))
    usable, lost = [d for d in found if not d.trouble], [d for d in found if d.trouble]
    numbered = [replace(device, index=index) for index, device in enumerate(usable)]
    return [*numbered, *(replace(device, index=-1) for device in lost)]


def _read_amd(root: Path) -> Iterator[Device]:
    nodes = sorted((int(path.name), path) for path in _children(root / KFD) if path.name.isdigit())
    numbers: dict[int, int] = {}  # KFD's node to ROCr's index
    devices: list[tuple[int, Device]] = []
    for number, folder in nodes:
        try:
            properties = parse_properties((folder / "properties").read_text())
        except OSError:
            continue  # of a GPU that this container has not got
        if properties.get("simd_count", 0) == 0:
            continue  # a CPU
        device = _amd_device(root, folder, properties)
        if not device.trouble:
            numbers[number] = len(numbers)
        devices.append((number, device))
    for number, device in devices:
        links = _links(root / KFD / str(number) / "io_links", numbers)
        yield replace(device, links=tuple(sorted(links)))


def _amd_device(root: Path, folder: Path, properties: Mapping[str, int]) -> Device:
    render = f"/dev/dri/renderD{properties.get('drm_render_minor', 0)}"
    pci, partition = pci_address(root, properties.get("domain", 0), properties.get("location_id", 0))
    place = root / PCI / pci
    numa_node = int(_text(place / "numa_node") or -1)
    banks = [parse_properties(_text(bank / "properties")) for bank in _children(folder / "mem_banks")]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in FRAME_BUFFERS)
    device_id = properties.get("device_id", 0)
    return Device(
        index=-1,
        vendor="amd",
        product=_text(place / "product_name") or PRODUCTS.get(device_id, f"AMD GPU {device_id:#06x}"),
        arch=arch_name(properties.get("gfx_target_version", 0)),
        compute_units=properties["simd_count"] // max(properties.get("simd_per_cu", 4), 1),
        memory_bytes=memory or int(_text(place / "mem_info_vram_total") or 0),
        pci=pci,
        partition=partition,
        compute_partition=_text(place / "current_compute_partition"),
        memory_partition=_text(place / "current_memory_partition"),
        numa_node=numa_node,
        cpus=cpus_of_node(root, numa_node),
        render=render,
        trouble=_trouble(root, render),
    )


def _trouble(root: Path, render: str) -> str:
    """Why the GPU behind this render device cannot be used; empty if it can."""
    for name in ("/dev/kfd", render):
        path = root / name.lstrip("/")
        if not path.exists():
            return f"{name} is missing"
        if not os.access(path, os.R_OK | os.W_OK):
            return f"{name} may not be opened by this user"
    return ""


def _links(folder: Path, numbers: Mapping[int, int]) -> Iterator[Link]:
    for path in _children(folder):
        link = parse_properties(_text(path / "properties"))
        if (device := numbers.get(link.get("node_to", -1))) is not None:
            kind = "XGMI" if link.get("type") == XGMI else "PCIe"
            yield Link(device, kind, link.get("weight", 0), link.get("max_bandwidth", 0))


def _read_nvidia(root: Path) -> Iterator[Device]:
    for folder in sorted(_children(root / NVIDIA), key=lambda path: path.name):
        lines = (line.partition(":") for line in _text(folder / "information").splitlines())
        told = {name.strip(): value.strip() for name, _, value in lines}
        numa_node = int(_text(root / PCI / folder.name.lower() / "numa_node") or -1)
        yield Device(
            index=-1,
            vendor="nvidia",
            product=told.get("Model", "NVIDIA GPU"),
            pci=folder.name.lower(),
            numa_node=numa_node,
            cpus=cpus_of_node(root, numa_node),
        )


def parse_properties(text: str) -> dict[str, int]:
    """Lines `name value` of the KFD's files; what is no number is left out."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def arch_name(version: int) -> str:
    """The KFD's gfx_target_version: 90402 is gfx942, 90010 is gfx90a."""
    if version <= 0:
        return ""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def pci_address(root: Path, domain: int, location: int) -> tuple[str, int]:
    """PCI address of the whole GPU, and which part of it: the location's function counts parts that PCI has not."""
    slot, function = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}", location & 7
    if function and not (root / PCI / f"{slot}.{function}").exists():
        return f"{slot}.0", function
    return f"{slot}.{function}", 0


def parse_cpus(text: str) -> tuple[int, ...]:
    """`0-3,8` is 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def cpus_of_node(root: Path, numa_node: int) -> tuple[int, ...]:
    return parse_cpus(_text(root / f"sys/devices/system/node/node{numa_node}/cpulist")) if numa_node >= 0 else ()


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """Empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
