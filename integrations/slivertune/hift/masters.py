"""Masters, the fp32 copies of 16-bit weights: split to half their bytes, and following weights that others write.

A master as the bf16 weight plus 16 bits that complete it: half the master's bytes, no bit lost. A bf16 weight w is the
fp32 master u rounded to nearest, ties to even. With `low`, the lower 16 bits of u:

- low < 0x8000: rounding went down, the upper half of u is w;
- low > 0x8000: rounding went up, the upper half of u is w - 1, as an integer;
- low = 0x8000: a tie. w is even either way, so it does not tell whether u's upper half was w (even, kept) or w - 1
  (odd, rounded up). Ties are rare; the positions of those that went up are listed.

Where somebody else has written the weights, the weights count, as they do for a plain optimizer.
"""

import torch

_TIE = -0x8000  # 0x8000 as int16


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take what the bf16 rounding of `master` loses.

    Args:
        master: fp32, any shape.

    Returns:
        `low`, int16 of the same shape, and `ties_up`, int32 of shape (ties that rounded up,): flat positions, sorted.
    """
    bits = master.view(torch.int32)
    low = bits.to(torch.int16)  # keeps the lower 16 bits
    ties_up = ((low == _TIE) & (bits & 0x10000 != 0)).flatten().nonzero().flatten().to(torch.int32)
    return low, ties_up


def join_master(weight: torch.Tensor, low: torch.Tensor, ties_up: torch.Tensor) -> torch.Tensor:
    """Rebuild the fp32 master from the weight that was rounded from it; the inverse of `split_master`.

    Args:
        weight: bf16, any shape.
        low: int16, the same shape.
        ties_up: int32 flat positions of the ties that rounded up.

    Returns:
        The fp32 master, the same shape.
    """
    upper = weight.view(torch.int16).to(torch.int32)
    lower = low.to(torch.int32) & 0xFFFF
    upper -= (lower > 0x8000).to(torch.int32)
    if ties_up.numel():
        upper[torch.unravel_index(ties_up.long(), upper.shape)] -= 1
    return upper.bitwise_left_shift_(16).bitwise_or_(lower).view(torch.float32)


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


def hash_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A number that tells whether anything was written to a tensor, without dimensions, on its device.

    What only changes elements' places may go unseen.

    Args:
        tensor: Of 2 bytes an element.
    """
    flat = tensor.detach().reshape(-1)
    wide = (
        flat.view(torch.int64) if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 else flat.view(torch.int16)
    )
    return torch.hash_tensor(wide).view(torch.int64)
