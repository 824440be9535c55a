"""Masters, the fp32 copies of 16-bit weights, follow weights that others have written, as in a plain optimizer."""

import torch

MASTER = "master"
"""Key of a master in the state of its weight."""


def refresh_master(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Copy the elements of a weight that others have written into its master.

    An element was written if its master does not round to it. Others keep their master to the bit, so that loading the
    same weights changes nothing. It compares values: writes to `weight.data` (averaging libraries) change no version.

    Takes 5 bytes of temporaries per element (`torch.where` casts the weight first), fewer than the step after it.

    Args:
        master: Master in fp32; changed in place.
        weight: Weight of the same shape and device, in 16 bits or in fp32, which a master equals.

    Returns:
        The master.
    """
    bits = torch.int32 if weight.dtype == torch.float32 else torch.int16
    written = master.to(weight.dtype).view(bits) != weight.view(bits)
    return torch.where(written, weight, master, out=master)
