"""DeepSpeed's collectives for CPUs (`shm_comm`), which it compiles at the first launch on a machine, in silence.

torch guards the compiling of an extension by a file, for which every other process waits without end. A process that is
killed meanwhile leaves the file behind.
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
"""A build takes one to some minutes; a lock that is older than this belongs to none."""


def build_folder() -> Path:
    """Where torch compiles the extension: in `TORCH_EXTENSIONS_DIR`, or in the user's cache."""
    asked = os.environ.get("TORCH_EXTENSIONS_DIR")
    if asked is not None:
        return Path(asked) / NAME
    versions = {"rocm": torch.version.hip, "cu": torch.version.cuda}
    accelerator = next((name + each.replace(".", "") for name, each in versions.items() if each is not None), "cpu")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root()) / f"{python}_{accelerator}" / NAME


def check_build(say: Callable[[str], object]) -> None:
    """Say that DeepSpeed is about to compile, or wait for another process that does.

    Call it before the process group of a run without GPUs is made, which is when DeepSpeed compiles.

    Args:
        say: Told in one line, if the launch is going to take longer than usual.

    Raises:
        RuntimeError: If it would wait for a build that has ended, with the file to remove.
    """
    try:
        import deepspeed
    except ImportError:
        return
    if not deepspeed.ops.__compatible_ops__.get(NAME, False):
        return  # it would not find what it needs to compile
    folder = build_folder()
    lock = folder / "lock"
    try:
        age_seconds = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        if not (folder / f"{NAME}.so").exists():
            say("DeepSpeed compiles its collectives for CPUs (shm_comm), once on each machine; this takes minutes")
        return
    if age_seconds > STALE_SECONDS:
        raise RuntimeError(
            f"DeepSpeed would wait without end for {lock}, which a build of its collectives for CPUs left "
            f"{age_seconds / 60:.0f} minutes ago when it was killed; if no process compiles there any more, remove it: "
            f"rm {lock}"
        )
    say(f"another process compiles DeepSpeed's collectives for CPUs (shm_comm); waiting until it removes {lock}")
