"""AG's estimate of the gradient of weights that are not trained yet (SFT, section 3.2, equation 8).

In the first update of an estimation phase, a pool of twice as many entries as the tensor trains follows the gradient
accumulated over all micro-batches. The largest entries become the candidates, whose gradients are then followed
exactly. The paper takes the candidates from one batch, its code from the first micro-batch alone, the noisiest choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slivertune.core.ledger import claim
from slivertune.sft.communicator import ALONE, Communicator
from slivertune.sft.largest import NONE, entries_at, largest_entries, largest_positions, within

POOL_FACTOR = 2
"""Entries in the pool per trained weight."""
PACKED_POOL_FACTOR = 1.5
"""Entries in the packed pool per trained weight, for 12 bytes per weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Moments of the candidates' gradients at the end of a phase."""

    indices: torch.Tensor
    """Positions of the candidates, int32, shape (m,), sorted."""
    mean: torch.Tensor
    """Mean of the gradient over the phase's updates, fp32, shape (m,)."""
    mean_square: torch.Tensor
    """Mean of its square, fp32, shape (m,)."""
    num_steps: int
    """Number of averaged updates."""

    def select(self, chosen: torch.Tensor) -> Estimate:
        """Return the estimate of some of the candidates.

        Args:
            chosen: Their indices, int64, sorted, then `NONE`.
        """
        return Estimate(
            indices=entries_at(self.indices, chosen, NONE),
            mean=entries_at(self.mean, chosen, 0),
            mean_square=entries_at(self.mean_square, chosen, 0),
            num_steps=self.num_steps,
        )


class GrowthEstimator:
    """Follows the gradients of one tensor's growth candidates through an estimation phase.

    It holds 16 bytes per trained weight: the pool's index and gradient of two entries, then a candidate's index,
    gradient of the running update, sum, and sum of squares. Packed, it holds 12: a smaller pool, and sums in bf16.

    Args:
        num_elements: Number of elements of the tensor.
        num_active: Number of its trained weights; as many of the others become candidates.
        num_spare: Number of further candidates, if others may be grown before the phase ends.
        packed: Whether to hold 12 bytes instead of 16.
    """

    def __init__(self, num_elements: int, num_active: int, *, num_spare: int = 0, packed: bool = False) -> None:
        self._num_elements = num_elements
        num_inactive = num_elements - num_active
        self.num_candidates = min(num_active + num_spare, num_inactive)
        pool_factor = PACKED_POOL_FACTOR if packed else POOL_FACTOR
        self._pool_size = min(max(int(pool_factor * num_active), self.num_candidates), num_inactive)
        self._dtype = torch.bfloat16 if packed else torch.float32
        self._indices: torch.Tensor | None = None
        self._step: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._sum_of_squares: torch.Tensor | None = None
        self._entrants: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._serial = -1
        self.num_steps = 0

    @property
    def has_candidates(self) -> bool:
        """Whether the first update of the phase is over."""
        return self._sum is not None

    def pool_magnitudes(self) -> torch.Tensor | None:
        """Return the magnitudes in the pool at the end of the first update, fp32, or None before and after."""
        return None if self._step is None or self.has_candidates else self._step.abs()

    def begin(self, serial: int) -> None:
        """Record the update of the coming gradients, and forget those of an abandoned update."""
        if serial == self._serial:
            return
        self._serial = serial
        self._entrants = []
        if not self.has_candidates:
            self._indices = self._step = None
        elif self._step is not None:
            self._step.zero_()

    @torch.no_grad()
    def feed(
        self, gradient: torch.Tensor, start: int, active: torch.Tensor, communicator: Communicator = ALONE
    ) -> None:
        """Add a part of one micro-batch's dense gradient, which is only read.

        Args:
            gradient: Part of the gradient, any floating dtype, shape (n,), contiguous.
            start: Position of its first element in the flattened tensor.
            active: Trained positions of the tensor, which can't be grown, int32, sorted.
            communicator: Connection to the ranks that feed the same part; used while there are no candidates.
        """
        if self._indices is not None and self._step is not None:
            self._add(gradient, start)
            if self.has_candidates:
                return
        taken = [active] if self._indices is None else [active, self._indices]
        found = largest_entries(gradient, self._pool_size, taken, start)
        self._admit(gradient, start, gradient.numel(), torch.where(found == NONE, NONE, found + start), communicator)

    def _add(self, gradient: torch.Tensor, start: int) -> None:
        """Add a part of a dense gradient at the pool's or the candidates' positions."""
        assert self._indices is not None and self._step is not None
        if gradient.numel() == self._num_elements:
            self._step += gradient.index_select(0, self._indices)
            return
        places = within(self._indices, start, gradient.numel())
        is_here = places < gradient.numel()
        values = gradient.index_select(0, places.clamp_(max=gradient.numel() - 1)).float()
        self._step += values.masked_fill_(~is_here, 0)

    @torch.no_grad()
    def join(self, start: int, length: int, device: torch.device, communicator: Communicator) -> None:
        """Take part in the exchange of other ranks' gradients, without a gradient on this rank.

        Args:
            start: Position of the part's first element.
            length: Number of elements of the part.
            device: Device of the gradients.
            communicator: Connection to the other ranks.
        """
        self._admit(None, start, length, torch.empty(0, dtype=torch.int64, device=device), communicator)

    def _admit(
        self, gradient: torch.Tensor | None, start: int, length: int, found: torch.Tensor, communicator: Communicator
    ) -> None:
        """Average a part at the positions of every rank's largest entries, which may enter the pool."""
        newcomers = communicator.union(found.int(), min(self._pool_size, length))
        if gradient is None:
            values = torch.zeros(newcomers.shape, dtype=torch.float32, device=found.device)
        else:
            places = torch.where(newcomers == NONE, NONE, newcomers - start)
            values = entries_at(gradient, places, 0).float()
        communicator.mean_([values])
        # Merge them with the entrants of earlier parts, so that at most a pool's size is held.
        self._entrants = [_largest_of_all([*self._entrants, (newcomers, values)], self._pool_size)]

    def running(self, serial: int) -> torch.Tensor | None:
        """Return the candidates' gradients of the running update, fp32, or zeros if there were none yet.

        None while there are no candidates.

        Args:
            serial: Number of the running update.
        """
        if self._step is None or not self.has_candidates:
            return None
        return self._step if serial == self._serial else torch.zeros_like(self._step)

    def set_running(self, gradients: torch.Tensor, serial: int) -> None:
        """Replace the candidates' gradients of the running update.

        Args:
            gradients: Gradients, fp32, one for each candidate.
            serial: Number of the running update.
        """
        self.begin(serial)
        if self._step is not None:
            self._step.copy_(gradients)

    @torch.no_grad()
    def end_backward(self, communicator: Communicator = ALONE) -> None:
        """Admit the largest newcomers to the pool, after all parts of a micro-batch's gradient were fed.

        Args:
            communicator: Connection to the ranks that feed the same tensor. They add to a mean that is the same on all
                of them, so the mean of the sums is the new one.
        """
        if self.has_candidates or not self._entrants:
            return
        parts = self._entrants
        if self._indices is not None and self._step is not None:
            communicator.mean_([self._step])
            parts = [(self._indices, self._step), *parts]
        self._entrants = []
        self._indices, self._step = _largest_of_all(parts, self._pool_size)
        del parts  # the former pool, which else counts beside the new one
        self.claim()

    @torch.no_grad()
    def end_step(self, serial: int, scale: torch.Tensor) -> None:
        """Count the running update's gradients. After the first, keep the best of the pool as candidates.

        Args:
            serial: Number of the update; if the tensor had no gradient in it, nothing is counted.
            scale: Factor that clipping or a loss scaler applied to the gradients, a scalar.
        """
        if serial != self._serial or self._indices is None or self._step is None:
            return
        self._step *= scale
        if self._sum is None or self._sum_of_squares is None:
            self._indices, first = _largest_of_all([(self._indices, self._step)], self.num_candidates)
            self._sum, self._sum_of_squares = first.to(self._dtype), first.square().to(self._dtype)
            self._step = torch.zeros_like(first)
            self.claim()
        else:
            self._sum.copy_(self._sum.float() + self._step)
            self._sum_of_squares.copy_(self._sum_of_squares.float().addcmul_(self._step, self._step))
            self._step.zero_()
        self._serial = -1
        self.num_steps += 1

    def estimate(self) -> Estimate | None:
        """Return the candidates' mean gradient and mean square, or None if the phase had no gradient of the tensor."""
        if self._indices is None or self._sum is None or self._sum_of_squares is None:
            return None
        return Estimate(
            indices=self._indices,
            mean=self._sum.float() / self.num_steps,
            mean_square=self._sum_of_squares.float() / self.num_steps,
            num_steps=self.num_steps,
        )

    def to(self, device: torch.device) -> None:
        """Move the tensors to a device."""
        for name in ("_indices", "_step", "_sum", "_sum_of_squares"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.to(device))
        self.claim()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that continues the phase between two updates, or None before its first update has ended."""
        if self._indices is None or self._sum is None or self._sum_of_squares is None:
            return None
        return {
            "indices": self._indices,
            "sum": self._sum,
            "sum_of_squares": self._sum_of_squares,
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Load a copy of a state that `state_dict` returned."""
        self._indices = state["indices"].to(device, copy=True)
        self._sum = state["sum"].to(device, self._dtype, copy=True)
        self._sum_of_squares = state["sum_of_squares"].to(device, self._dtype, copy=True)
        self._step = torch.zeros(self._sum.shape, dtype=torch.float32, device=device)
        self.num_steps = state["num_steps"]
        self.claim()

    def claim(self) -> None:
        """Register the state with the memory ledger."""
        for tensor in (self._indices, self._step, self._sum, self._sum_of_squares):
            if tensor is not None:
                claim(tensor, "state")


def _largest_of_all(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` entries of largest magnitude in several disjoint sets, sorted by position, then `NONE`."""
    indices, values = parts[0]
    if len(parts) > 1:
        indices, order = torch.cat([indices for indices, _ in parts]).sort()
        values = torch.cat([values for _, values in parts]).index_select(0, order)
        del order
    elif indices.numel() <= count:
        return parts[0]
    chosen = largest_positions(values.abs(), min(count, indices.numel()), indices != NONE)
    return entries_at(indices, chosen, NONE), entries_at(values, chosen, 0)
