"""What a benchmark ran on: the machine and the versions, as every result file under `results/` records them."""

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "deepspeed", "slivertune")


def record_environment(packages: Sequence[str] = PACKAGES) -> dict[str, object]:
    """Describe the machine and the versions, without host names or paths.

    Args:
        packages: Distributions whose versions are recorded; one that is not installed is recorded as None.

    Returns:
        A plain dict for JSON: date (UTC), processor, cores this process may use, torch's threads, the GPUs if there
        are any, Python, operating system, versions.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": _processor_name(),
        "num_cores": _num_cores(),
        "num_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor_name() -> str:
    # platform.processor() is empty or just "x86_64" on Linux; the kernel knows the model.
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
