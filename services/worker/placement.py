"""Which GPU this worker process has, and which CPUs: decided from the kernel's files before torch is imported.

The process takes the GPU of its number among those that it may see, and from then on sees no other: its children
(compilers, self-tests) use the same one, and no memory is taken on others. A rank of a group sees the GPUs of all its
ranks, whose memory it may read. It runs on the CPUs of its own GPU's NUMA node.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import env
from common.config import Config
from services.worker.devices import Device, read_devices

log = logging.getLogger("worker")


class Seat(NamedTuple):
    """`number`: which of the GPUs that torch sees from now on."""

    number: int
    device: Device | None = None


def take_seat(config: Config, instance: int, root: Path = Path("/"), rank: int = 0) -> Seat:
    """For a rank of worker number `instance`. Where it has no GPU nothing changes: choosing a device says so."""
    ranks = config.worker.tensor_parallel
    first = 0 if config.worker.device == "cuda:0" else instance * ranks
    if config.worker.kind != "model" or config.worker.device == "cpu":
        return Seat(first + rank)
    usable = [device for device in read_devices(root) if not device.trouble]
    if not usable:
        return Seat(first + rank)
    setting = env.show_devices(usable[0].vendor, range(first, first + ranks), len(usable))
    if setting is None:
        return Seat(first + rank)
    device = device_of(setting, usable, rank)
    where = f": {device.product}, {device.pci}" if device else ""
    log.info("this process sees %s, by %s%s", "one GPU" if ranks == 1 else f"{ranks} GPUs", setting, where)
    if device and config.worker.near_cpus:
        keep_to(device)
    return Seat(rank, device)


def device_of(setting: str, usable: Sequence[Device], rank: int = 0) -> Device | None:
    """The device of the rank's entry in `NAME=entries`, if that is an index and no other list counts before it."""
    name, _, entries = setting.partition("=")
    entry = entries.split(",")[rank]
    names = env.DEVICE_LISTS[usable[0].vendor]
    nested = any(env.is_set(outer) for outer in names[names.index(name) + 1 :])
    if nested or not entry.isdecimal() or int(entry) >= len(usable):
        return None
    return usable[int(entry)]


def keep_to(device: Device) -> None:
    """From now on this process and its children run on CPUs near the device, as far as they may run there."""
    allowed = os.sched_getaffinity(0)
    near = allowed & set(device.cpus)
    if near == allowed or not device.cpus:
        return
    if not near:
        log.warning("none of this process's CPUs is on NUMA node %d of its GPU: copies cross it", device.numa_node)
        return
    os.sched_setaffinity(0, near)
    log.info("runs on %d of %d CPUs: NUMA node %d, that of its GPU", len(near), len(allowed), device.numa_node)
