"""What kind of GPU a device is. All that depend on it ask here: choices of kernels, tables, formats, keys of caches."""

import torch


def arch_of(device: torch.device) -> str:
    """gfx942, sm_90; empty on a CPU."""
    if device.type == "cpu":
        return ""
    properties = torch.cuda.get_device_properties(device)
    # a build for NVIDIA gives the GPU's whole name in the place of AMD's architecture
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"
