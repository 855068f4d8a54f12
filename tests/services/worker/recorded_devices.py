"""Hosts with AMD GPUs as their kernel files and tools show them, written below a folder.

Where the forms come from: node files of `/sys/class/kfd` are those that ROCm/k8s-device-plugin records in testdata/
(topo-mi300-cpx: a host of MI300X in CPX, values as they are there; topology-parsing-mi308); names
of PCI files from the Linux kernel's amdgpu_xcp.c and amdgpu_gmc.c; `amd-smi static --json` from its source
(amdsmi_commands.py, static_gpu) and the models of amd/node-scraper; `amd-smi topology --json` from its change log;
`rocminfo` from outputs in public issues. Counts of CUs and sizes of MI325X, MI350X, MI355X: ROCm's page "gpu-specs".
Not recorded on hardware of ours: we have none.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

CPU_NODE = """\
cpu_cores_count 96
simd_count 0
mem_banks_count 1
caches_count 0
io_links_count 33
p2p_links_count 31
cpu_core_id_base 0
simd_id_base 0
max_waves_per_simd 0
lds_size_in_kb 0
gds_size_in_kb 0
num_gws 0
wave_front_size 0
array_count 0
simd_arrays_per_engine 0
cu_per_simd_array 0
simd_per_cu 0
max_slots_scratch_cu 0
gfx_target_version 0
vendor_id 0
device_id 0
location_id 0
domain 0
drm_render_minor 0
hive_id 0
num_sdma_engines 0
num_sdma_xgmi_engines 0
num_sdma_queues_per_engine 0
num_cp_queues 0
max_engine_clk_ccompute 2750
"""
GPU_NODE = """\
cpu_cores_count 0
simd_count {simds}
mem_banks_count 1
caches_count 80
io_links_count 63
p2p_links_count 1
cpu_core_id_base 0
simd_id_base 2147488064
max_waves_per_simd 8
lds_size_in_kb {lds}
gds_size_in_kb 0
num_gws 64
wave_front_size 64
array_count 4
simd_arrays_per_engine 1
cu_per_simd_array 10
simd_per_cu 4
max_slots_scratch_cu 32
gfx_target_version {gfx}
vendor_id 4098
device_id {device_id}
location_id {location}
domain 0
drm_render_minor {minor}
hive_id 15188982192727901047
num_sdma_engines 2
num_sdma_xgmi_engines 0
num_sdma_queues_per_engine 8
num_cp_queues 24
max_engine_clk_fcompute 2100
local_mem_size 0
fw_version 177
capability 2893521536
debug_prop 1511
sdma_fw_version 24
unique_id 16404946649897475633
num_xcc {xccs}
max_engine_clk_ccompute 2750
"""
LINK = """\
type {kind}
version_major 0
version_minor 0
node_from {source}
node_to {target}
weight {weight}
min_latency 0
max_latency 0
min_bandwidth {bandwidth}
max_bandwidth {bandwidth}
recommended_transfer_size 0
recommended_sdma_engine_id_mask 3
flags 1
"""


class Board(NamedTuple):
    """A product, whole."""

    name: str
    device_id: int
    gfx: int
    compute_units: int
    memory_bytes: int
    lds: int = 64


MI300X = Board("AMD Instinct MI300X", 0x74A1, 90402, 304, 192 * 2**30)
MI325X = Board("AMD Instinct MI325X", 0x74A5, 90402, 304, 256 * 2**30)
MI350X = Board("AMD Instinct MI350X", 0x75A0, 90500, 256, 288 * 2**30, 160)
MI355X = Board("AMD Instinct MI355X", 0x75A3, 90500, 256, 288 * 2**30, 160)
BUSES = (0x05, 0x27, 0x47, 0x65, 0x85, 0xA7, 0xC7, 0xE5)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def plant(root: Path, board: Board, gpus: int = 8, mode: str = "SPX", memory: str = "NPS1", named: bool = True) -> None:
    """A host with two CPUs and `gpus` boards, each whole (SPX) or in eight parts (CPX)."""
    nodes, parts = root / "sys/class/kfd/kfd/topology/nodes", 8 if mode == "CPX" else 1
    write(root / "dev/kfd", "")
    for cpu in range(2):
        write(nodes / f"{cpu}/properties", CPU_NODE)
        write(root / f"sys/devices/system/node/node{cpu}/cpulist", f"{cpu * 96}-{cpu * 96 + 95}\n")
    total = gpus * parts
    for number in range(total):
        gpu, part = divmod(number, parts)
        node, pci = nodes / str(2 + number), root / f"sys/bus/pci/devices/0000:{BUSES[gpu]:02x}:00.0"
        properties = GPU_NODE.format(
            simds=board.compute_units * 4 // parts,
            lds=board.lds,
            gfx=board.gfx,
            device_id=board.device_id,
            location=(BUSES[gpu] << 8) + part,
            minor=128 + number,
            xccs=8 // parts,
        )
        write(node / "properties", properties)
        size = board.memory_bytes // parts
        write(node / "mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {size}\nflags 0\nwidth 8192\n")
        write(node / "io_links/0/properties", _link(2, 2 + number, gpu * 2 // max(gpus, 2), 20, 64000))
        for other in range(total):
            if other != number:
                near = other // parts == gpu
                text = _link(11, 2 + number, 2 + other, 13 if near else 15, 819200 if near else 64000)
                write(node / f"io_links/{1 + other}/properties", text)
        write(pci / "numa_node", f"{gpu * 2 // max(gpus, 2)}\n")
        write(pci / "product_name", f"{board.name}\n" if named else "\n")
        write(pci / "mem_info_vram_total", f"{board.memory_bytes}\n")
        write(pci / "current_compute_partition", f"{mode}\n")
        write(pci / "current_memory_partition", f"{memory}\n")
        write(root / f"dev/dri/renderD{128 + number}", "")


def _link(kind: int, source: int, target: int, weight: int, bandwidth: int) -> str:
    return LINK.format(kind=kind, source=source, target=target, weight=weight, bandwidth=bandwidth)


def amd_smi_static(board: Board, gpus: int, mode: str = "SPX", wrapped: bool = True, old: bool = False) -> str:
    """`amd-smi static --json`; `wrapped`: as since ROCm 7; `old`: names of ROCm 6.2."""
    arch = {90402: "gfx942", 90500: "gfx950"}[board.gfx]
    rows: list[dict[str, Any]] = [
        {
            "gpu": gpu,
            "asic": {
                "market_name": board.name,
                "vendor_id": "0x1002",
                "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
                "subvendor_id": "0x1002",
                "device_id": f"{board.device_id:#06x}",
                "subsystem_id": f"{board.device_id:#06x}",
                "rev_id": "0x00",
                "asic_serial": "0x0000000000000001",
                "oam_id": gpu,
                "num_compute_units": board.compute_units,
                "target_graphics_version": arch,
            },
            "bus": {
                "bdf": f"0000:{BUSES[gpu]:02X}:00.0",
                "max_pcie_width": 16,
                "max_pcie_speed": {"value": 32, "unit": "GT/s"},
                "pcie_interface_version": "Gen 5",
                "slot_type": "OAM",
            },
            "driver": {"name": "amdgpu", "version": "6.12.12"},
            "numa": {"node": gpu * 2 // gpus, "affinity": 0},
            "vram": {
                "type": "HBM3",
                "vendor": "N/A",
                "size": {"value": board.memory_bytes // 2**20, "unit": "MB"},
                "bit_width": {"value": 8192, "unit": "bit"},
            },
            "partition": {
                "compute_partition" if old else "accelerator_partition": mode,
                "memory_partition": "NPS1",
                "partition_id": 0,
            },
        }
        for gpu in range(gpus)
    ]
    return json.dumps({"gpu_data": rows} if wrapped else rows, indent=4)


def amd_smi_topology(gpus: int) -> str:
    """`amd-smi topology --json`."""
    rows = []
    for gpu in range(gpus):
        links = []
        for other in range(gpus):
            own = other == gpu
            links.append(
                {
                    "gpu": other,
                    "bdf": f"0000:{BUSES[other]:02x}:00.0",
                    "weight": 0 if own else 15,
                    "link_status": "ENABLED",
                    "link_type": "SELF" if own else "XGMI",
                    "num_hops": 0 if own else 1,
                    "bandwidth": "N/A" if own else "50000-100000",
                }
            )
        rows.append({"gpu": gpu, "bdf": f"0000:{BUSES[gpu]:02x}:00.0", "links": links})
    return json.dumps(rows, indent=4)


ROCMINFO = """\
ROCk module is loaded
=====================
HSA System Attributes
=====================
Runtime Version:         1.15
Runtime Ext Version:     1.7
System Timestamp Freq.:  1000.000000MHz

==========
HSA Agents
==========
*******
Agent 1
*******
  Name:                    AMD EPYC 9654 96-Core Processor
  Uuid:                    CPU-XX
  Marketing Name:          AMD EPYC 9654 96-Core Processor
  Vendor Name:             CPU
  Feature:                 None specified
  Node:                    0
  Device Type:             CPU
  Compute Unit:            96
  Pool Info:
    Pool 1
      Segment:                 GLOBAL; FLAGS: FINE GRAINED
      Size:                    1056871544(0x3efe9478) KB
  ISA Info:
*******
Agent 2
*******
  Name:                    gfx942
  Uuid:                    GPU-07386a321fa45d1e
  Marketing Name:          AMD Instinct MI300X
  Vendor Name:             AMD
  Feature:                 KERNEL_DISPATCH
  Node:                    2
  Device Type:             GPU
  Cache Info:
    L1:                      32(0x20) KB
    L2:                      4096(0x1000) KB
    L3:                      262144(0x40000) KB
  Chip ID:                 29857(0x74a1)
  Max Clock Freq. (MHz):   2100
  BDFID:                   6912
  Internal Node ID:        2
  Compute Unit:            304
  SIMDs per CU:            4
  Pool Info:
    Pool 1
      Segment:                 GLOBAL; FLAGS: COARSE GRAINED
      Size:                    201310208(0xbffc000) KB
      Allocatable:             TRUE
    Pool 2
      Segment:                 GROUP
      Size:                    64(0x40) KB
  ISA Info:
    ISA 1
      Name:                    amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-
      Machine Models:          HSA_MACHINE_MODEL_LARGE
*** Done ***
"""
