"""Whether memory of this process is mapped."""

import ctypes
import mmap


def is_mapped(address: int) -> bool:
    """Whether this process has a page there."""
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    return ctypes.CDLL(None).mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(ctypes.c_char())) == 0
