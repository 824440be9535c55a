"""Single source of the number of bytes of a CUDA device that belong to this process."""

import torch


def usable_bytes(device: torch.device | None = None) -> int:
    """Return the bytes of a CUDA device that this process could hold, including those its allocator holds already.

    Memory of other processes does not count, nor does memory that `torch.cuda.set_per_process_memory_fraction` forbids.

    Args:
        device: A CUDA device. None is the current one.
    """
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), allowed)
