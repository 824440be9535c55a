"""Choice of the positions that keep their gradient: pure, the same on every device (TokenTune, section 3.2)."""

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from slivertune.tokentune.config import Pattern


def count_selected(ratio: float | None, num_tokens: int | None, length: int, num_always: int) -> int:
    """Compute the number k of positions to select in each sequence of a batch.

    Args:
        ratio: Share of the length, in (0, 1], or None.
        num_tokens: Number k itself, or None.
        length: Number n of positions in a padded sequence.
        num_always: Number of positions that must be among them.

    Returns:
        Number k, in [1, length].

    Raises:
        ValueError: If `num_tokens` is greater than the length.
    """
    if num_tokens is not None and num_tokens > length:
        raise ValueError(
            f"num_tokens={num_tokens} is more than the {length} positions of this batch. Lower it, pad to a fixed "
            "length, or give a ratio"
        )
    wanted = num_tokens if ratio is None else round(ratio * length)
    return min(length, max(1, num_always, wanted or 0))


def make_generator(seed: int, rank: int, draw: int) -> torch.Generator:
    """Make the generator of one draw, which depends only on these three numbers.

    So a checkpoint stores only the number of draws, whatever the number of ranks when it is loaded.

    Args:
        seed: Seed of the run.
        rank: Data-parallel rank, so that ranks select differently.
        draw: Number of the draw.

    Returns:
        Generator on the CPU.
    """
    digest = hashlib.blake2b(f"{seed} {rank} {draw}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def draw_positions(
    real: torch.Tensor,
    num_selected: int,
    *,
    pattern: Pattern,
    generator: torch.Generator,
    chunk_size: int = 16,
    always: Sequence[int] = (),
    preferred: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw the positions of a batch.

    Positions are taken in this order until there are enough: always selected ones, preferred ones, other real ones,
    padding. Within each kind the pattern decides.

    Args:
        real: Mask of tokens that are not padding, bool, shape (batch, length).
        num_selected: Number k of positions, in [1, length], not less than `len(always)`.
        pattern: Pattern of the positions.
        generator: Source of randomness, on the CPU.
        chunk_size: Positions in a chunk.
        always: Positions counted in real tokens, from the end if negative. A sequence without such a token has none.
        preferred: Mask of positions to select first, bool, shape (batch, length).
        starts: Mask of the first positions of packed segments, bool, shape (batch, length); no chunk crosses them.

    Returns:
        Sorted positions, int64, shape (batch, num_selected), on the device of `real`.
    """
    score = _pattern_scores(real, num_selected, pattern, generator, chunk_size, starts)  # in [0, 1]
    score = score + 4.0 * real
    if preferred is not None:
        score = score + 2.0 * (preferred & real)
    for rank in always:
        score = score + 16.0 * _is_real_token(real, rank)
    order = score.sort(dim=1, descending=True, stable=True).indices
    return order[:, :num_selected].sort(dim=1).values


def _pattern_scores(
    real: torch.Tensor,
    num_selected: int,
    pattern: Pattern,
    generator: torch.Generator,
    chunk_size: int,
    starts: torch.Tensor | None,
) -> torch.Tensor:
    batch, length = real.shape
    # Drawn on the CPU, whatever the device, so that a seed means the same everywhere.
    noise = torch.rand(batch, length + 2, generator=generator, dtype=torch.float64, device="cpu").to(real.device)
    scores, offsets, sides = noise[:, :length], noise[:, length : length + 1], noise[:, length + 1 :]
    if pattern == "random":
        return scores
    if pattern == "block":
        return _block_scores(real, offsets, num_selected)
    by_chunk = scores.gather(1, _chunk_of_position(offsets, length, chunk_size, starts))
    # The chunk that is taken in part begins at either end, so that no position is selected more often than others.
    tilt = torch.arange(length, dtype=torch.float32, device=real.device) * (1e-9 / length)
    return by_chunk + torch.where(sides < 0.5, -tilt, tilt)


def _chunk_of_position(
    offsets: torch.Tensor, length: int, chunk_size: int, starts: torch.Tensor | None
) -> torch.Tensor:
    """Return each position's chunk index, int64, shape (batch, length), for `offsets` in [0, 1), shape (batch, 1)."""
    positions = torch.arange(length, device=offsets.device)[None, :]
    if starts is None:
        begins = torch.zeros_like(positions)
    else:
        begins = torch.where(starts, positions, 0).cummax(dim=1).values
    within = positions - begins
    shift = (offsets * chunk_size).long()
    is_first = (within == 0) | ((within + shift) % chunk_size == 0)
    return is_first.long().cumsum(dim=1) - 1


def _block_scores(real: torch.Tensor, offsets: torch.Tensor, num_selected: int) -> torch.Tensor:
    """Return scores that fall along one run of real tokens, which begins anywhere it fits, and then around it."""
    place = real.long().cumsum(dim=1) - 1  # index of a real token among the real ones
    num_real = real.long().sum(dim=1, keepdim=True)
    first = (offsets * (num_real - num_selected + 1).clamp(min=1)).long()
    behind = (place - first) % num_real.clamp(min=1)
    return 1.0 - behind.double() / (real.shape[1] + 1)


def _is_real_token(real: torch.Tensor, rank: int) -> torch.Tensor:
    count = real.long().cumsum(dim=1)
    place = count - 1 if rank >= 0 else count - 1 - count[:, -1:]
    return real & (place == rank)


def segment_starts(position_ids: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Find the first positions of packed segments.

    Args:
        position_ids: Positions within the segments, which begin at 0, integers, shape (batch or 1, length); or None.
        batch: Number of sequences.

    Returns:
        Mask, bool, shape (batch, length), or None if the positions do not tell.
    """
    if position_ids is None or position_ids.dim() != 2:
        return None
    return (position_ids == 0).expand(batch, -1)


def shift_labels(labels: torch.Tensor, ignored: int = -100) -> torch.Tensor:
    """Shift labels to a causal model's targets: position i is scored on token i + 1, the last one on nothing.

    Args:
        labels: Labels, int64, shape (batch, length).
        ignored: Label of tokens that are not scored.

    Returns:
        Targets, int64, shape (batch, length).
    """
    return F.pad(labels, (0, 1), value=ignored)[:, 1:]
