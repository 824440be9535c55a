"""The library of the pretended device: compiled by one call, kept by what it was made from, loaded before torch."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared")
_MAX_DEVICES = 16


class NoDeviceError(RuntimeError):
    """Nothing can run on the pretended device: there is no g++, or torch has CUDA devices of its own."""


class Kind(IntEnum):
    """Kinds of entries, in the order of `device.cpp`."""

    ALLOCATE = 0
    FREE = 1
    RECORD = 2
    BLOCK = 3
    WAIT_EVENT = 4
    WAIT_STREAM = 5
    WAIT_DEVICE = 6
    KEEP_FOR = 7
    REGISTER = 8
    UNREGISTER = 9


class Entry(ctypes.Structure):
    """One entry of the device's log."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("device", ctypes.c_int64),
        ("stream", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("second", ctypes.c_int64),
    )


def build() -> Path:
    """Compile the library, unless the same one lies in the cache.

    Returns:
        Its file.

    Raises:
        NoDeviceError: If there is no g++, or torch is built for CUDA.
        RuntimeError: With the compiler's messages, if it can't be compiled.
    """
    if (_torch_folder() / "lib" / "libtorch_cuda.so").exists():
        raise NoDeviceError("this torch is built for CUDA, whose devices can't be pretended; install its CPU build")
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoDeviceError("no g++ was found, so nothing runs on the pretended CUDA device; install one")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    torch_version = importlib.metadata.version("torch")
    made_from = "\n".join([SOURCE.read_text(encoding="utf-8"), version, torch_version, *_FLAGS, str(_torch_folder())])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slivertune-tests"
    target = cache / f"pretended_cuda-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as aside:
        made = Path(aside) / target.name
        torch = _torch_folder()
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{torch / 'lib'}"]
        command = [compiler, *_FLAGS, f"-I{torch / 'include'}", str(SOURCE), "-o", str(made), *libraries]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")
        made.rename(target)
    return target


def load(num_devices: int = 1) -> ctypes.CDLL:
    """Load the library, with which torch sees CUDA devices.

    Args:
        num_devices: How many.

    Raises:
        RuntimeError: If torch was imported before.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the pretended device has to be loaded before torch is imported")
    if not 1 <= num_devices <= _MAX_DEVICES:
        raise ValueError(f"num_devices={num_devices} must be from 1 to {_MAX_DEVICES}")
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    integer, address, size = ctypes.c_int64, ctypes.c_uint64, ctypes.c_size_t
    for name, arguments, result in (
        ("stream", [ctypes.c_int], integer),
        ("set_stream", [ctypes.c_int, integer], None),
        ("memory", [ctypes.c_int, ctypes.POINTER(integer)], None),
        ("limit", [ctypes.c_int, integer, integer], None),
        ("register", [address, size], ctypes.c_int),
        ("unregister", [address], ctypes.c_int),
        ("resize_storage", [ctypes.c_void_p, size], ctypes.c_int),
        ("take", [ctypes.POINTER(Entry), ctypes.c_int], ctypes.c_int),
    ):
        function = getattr(library, f"pretended_{name}")
        function.argtypes, function.restype = arguments, result
    library.pretended_set_devices(num_devices)
    return library


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("torch is not installed")
    return Path(spec.submodule_search_locations[0])
