"""Masters, the fp32 copies of 16-bit weights, follow weights that others have written, as a plain optimizer would."""

import torch


def refresh_master(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Let a master follow its weight: where it does not round to it, somebody has written the weight, and it counts.

    Elements that were not written keep their master to the bit, so that loading the same weights changes nothing.
    Values are compared, not versions: writes into `weight.data`, as averaging libraries make them, leave no trace.

    Takes 3 bytes of temporaries an element, fewer than the gradient that is cast to fp32 after it.

    Args:
        master: fp32; changed in place.
        weight: Of the same shape and device; in 16 bits, or fp32, which a master equals.

    Returns:
        The master.
    """
    bits = torch.int32 if weight.dtype == torch.float32 else torch.int16
    written = master.to(weight.dtype).view(bits) != weight.view(bits)
    return torch.where(written, weight, master, out=master)
