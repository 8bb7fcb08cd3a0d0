"""What measured times depend on beside the code."""

import platform
from pathlib import Path
from typing import Any

import torch


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions, threads and the names of the processor and the device, for people and for JSON."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": processor}
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    return machine
