"""GPUs as ROCm's and NVIDIA's own tools list them, for hosts whose kernel files tell nothing. Pure parsers and one
asker.

`amd-smi static --json` and `topology --json` (a list up to ROCm 6.4, below "gpu_data" since), `rocminfo`, `nvidia-smi
--query-gpu=... --format=csv,noheader,nounits`. What a tool does not know it writes as "N/A". Called by `valence
doctor`.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from services.worker.devices import Device, Link, read_devices

ASK_S = 20.0  # amd-smi takes seconds on a node of eight
UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}  # amd-smi writes MB for MiB
AMD_STATIC = ("amd-smi", "static", "--json")
AMD_TOPOLOGY = ("amd-smi", "topology", "--json")
NVIDIA_QUERY = ("name", "memory.total", "compute_cap", "pci.bus_id")
NVIDIA = ("nvidia-smi", f"--query-gpu={','.join(NVIDIA_QUERY)}", "--format=csv,noheader,nounits")

Ask = Callable[[Sequence[str]], str]


def ask(command: Sequence[str]) -> str:
    """What the command prints; empty if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def find_devices(asking: Ask = ask) -> list[Device]:
    """From the kernel's files, completed or replaced by what tools say."""
    found = read_devices()
    if found and found[0].vendor == "nvidia":
        return completed(found, from_nvidia_smi(asking(NVIDIA)))
    if found:
        return found
    listed = from_amd_smi(asking(AMD_STATIC), asking(AMD_TOPOLOGY))
    return listed or from_rocminfo(asking(("rocminfo",))) or from_nvidia_smi(asking(NVIDIA))


def completed(found: Sequence[Device], listed: Sequence[Device]) -> list[Device]:
    """`found` with the arch and memory that `listed` has for the same place."""
    by_place = {device.pci: device for device in listed}
    return [
        replace(device, arch=more.arch, memory_bytes=more.memory_bytes)
        if (more := by_place.get(device.pci))
        else device
        for device in found
    ]


def from_amd_smi(static: str, topology: str = "") -> list[Device]:
    """The output of AMD_STATIC and AMD_TOPOLOGY."""
    links = {_number(entry.get("gpu")): tuple(_amd_links(entry)) for entry in _entries(topology)}
    return [_amd_device(entry, links.get(_number(entry.get("gpu")), ())) for entry in _entries(static)]


def _amd_device(entry: dict[str, Any], links: tuple[Link, ...]) -> Device:
    asic, parts = _table(entry, "asic"), _table(entry, "partition")
    return Device(
        index=_number(entry.get("gpu")),
        vendor="amd",
        product=_known(asic.get("market_name")) or "AMD GPU",
        arch=_known(asic.get("target_graphics_version")),
        compute_units=max(_number(asic.get("num_compute_units")), 0),
        memory_bytes=_size(_table(entry, "vram").get("size")),
        pci=_known(_table(entry, "bus").get("bdf")).lower(),
        partition=max(_number(parts.get("partition_id")), 0),
        compute_partition=_known(parts.get("accelerator_partition") or parts.get("compute_partition")),
        memory_partition=_known(parts.get("memory_partition")),
        numa_node=_number(_table(entry, "numa").get("node")),
        links=links,
    )


def _amd_links(entry: dict[str, Any]) -> Iterator[Link]:
    for link in entry.get("links", []):
        kind = {"XGMI": "XGMI", "PCIE": "PCIe"}.get(str(link.get("link_type")))
        if kind:
            most = str(link.get("bandwidth", "")).rpartition("-")[2]
            yield Link(_number(link.get("gpu")), kind, _number(link.get("weight")), max(_number(most), 0))


def from_rocminfo(text: str) -> list[Device]:
    """Agents that are GPUs, in their order."""
    found: list[Device] = []
    for agent in re.split(r"^Agent \d+\s*$", text, flags=re.MULTILINE)[1:]:
        pairs = (line.partition(":") for line in agent.splitlines())
        told: dict[str, str] = {}
        for name, _, value in pairs:
            told.setdefault(name.strip(), value.strip())  # the first: later ones are of pools and instruction sets
        if told.get("Device Type") != "GPU":
            continue
        sizes = [int(size) for size in re.findall(r"^\s+Size:\s+(\d+)\(0x[0-9a-f]+\) KB", agent, re.MULTILINE)]
        location, domain = _number(told.get("BDFID")), max(_number(told.get("Domain")), 0)
        found.append(
            Device(
                index=len(found),
                vendor="amd",
                product=told.get("Marketing Name") or "AMD GPU",
                arch=told.get("Name", "").partition(":")[0],
                compute_units=max(_number(told.get("Compute Unit")), 0),
                memory_bytes=max(sizes, default=0) * 1024,
                pci=f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.0" if location >= 0 else "",
                partition=location & 7 if location >= 0 else 0,
            )
        )
    return found


def from_nvidia_smi(text: str) -> list[Device]:
    """The output of NVIDIA: one line per GPU."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        Device(
            index=index,
            vendor="nvidia",
            product=name,
            arch=f"sm_{capability.replace('.', '')}" if capability[:1].isdigit() else "",
            memory_bytes=max(_number(mib), 0) * 2**20,
            pci=bus.lower()[-12:],  # the domain has eight digits here and four in the kernel's files
        )
        for index, (name, mib, capability, bus) in enumerate(row for row in rows if len(row) == len(NVIDIA_QUERY))
    ]


def _entries(text: str) -> list[dict[str, Any]]:
    """One table per GPU; none from what is no JSON."""
    try:
        told = json.loads(text)
    except ValueError:
        return []
    rows = told.get("gpu_data", []) if isinstance(told, dict) else told
    return [row for row in rows if isinstance(row, dict)]


def _table(entry: dict[str, Any], name: str) -> dict[str, Any]:
    value = entry.get(name)
    return value if isinstance(value, dict) else {}


def _known(value: object) -> str:
    return "" if value is None or str(value) == "N/A" else str(value)


def _number(value: object) -> int:
    """-1 for what is none."""
    text = str(value).strip()
    return int(text) if text.isdigit() else -1


def _size(value: object) -> int:
    """`{"value": 192, "unit": "GB"}` or `192 GB` in bytes."""
    number, unit = (value.get("value"), value.get("unit")) if isinstance(value, dict) else (value, "")
    if not isinstance(value, dict):
        number, _, unit = str(value).partition(" ")
    return max(_number(number), 0) * UNITS.get(str(unit), 0)
