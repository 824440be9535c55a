"""DeepSpeed's collectives for CPUs (`shm_comm`), which it compiles silently at the first launch on a machine.

torch protects the compilation of an extension by a lock file, for which every other process waits without a timeout. A
process that is killed while it compiles leaves the file behind.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_default_build_root

NAME = "deepspeed_shm_comm"
STALE_SECONDS = 15 * 60
"""Age in seconds from which a lock counts as stale. A build takes one to a few minutes."""


def build_folder() -> Path:
    """Return the folder of the compiled extension: in `TORCH_EXTENSIONS_DIR`, or in the user's cache."""
    asked = os.environ.get("TORCH_EXTENSIONS_DIR")
    if asked is not None:
        return Path(asked) / NAME
    versions = {"rocm": torch.version.hip, "cu": torch.version.cuda}
    accelerator = next((name + each.replace(".", "") for name, each in versions.items() if each is not None), "cpu")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root()) / f"{python}_{accelerator}" / NAME


def check_build(say: Callable[[str], object]) -> None:
    """Announce that DeepSpeed is about to compile, or to wait for another process that compiles.

    Call it before the process group of a run without GPUs is made, because DeepSpeed compiles then.

    Args:
        say: Function that gets one line, if the launch will take longer than usual.

    Raises:
        RuntimeError: If DeepSpeed would wait for a build that was killed; names the file to remove.
    """
    try:
        import deepspeed
    except ImportError:
        return
    if not deepspeed.ops.__compatible_ops__.get(NAME, False):
        return  # DeepSpeed would not find its compiler or libraries
    folder = build_folder()
    lock = folder / "lock"
    try:
        age_seconds = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        if not (folder / f"{NAME}.so").exists():
            say("DeepSpeed compiles its collectives for CPUs (shm_comm), once per machine. This takes minutes")
        return
    if age_seconds > STALE_SECONDS:
        raise RuntimeError(
            f"DeepSpeed would wait forever for {lock}, left {age_seconds / 60:.0f} minutes ago by a killed build of "
            f"its collectives for CPUs. If no process compiles there any more, remove it: rm {lock}"
        )
    say(f"another process compiles DeepSpeed's collectives for CPUs (shm_comm). Waiting until it removes {lock}")
