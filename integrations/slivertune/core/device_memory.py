"""How much of a CUDA device belongs to this process: the one place that answers it."""

import torch


def usable_bytes(device: torch.device | None = None) -> int:
    """Return the bytes that this process could hold of a CUDA device, with what its allocator holds already.

    Memory of other processes is left out, and so is what `torch.cuda.set_per_process_memory_fraction` forbids.

    Args:
        device: A CUDA device; None is the current one.
    """
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), allowed)
