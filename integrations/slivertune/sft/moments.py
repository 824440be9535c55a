"""What the two update rules keep for a tensor's trained weights: AdamW's moments and ages, or SM3's accumulators."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from slivertune.sft.adam import adamw_, age_dtype, age_limit, seeded_moments
from slivertune.sft.config import SFTConfig
from slivertune.sft.growth import Estimate
from slivertune.sft.packing import rounded_at_random
from slivertune.sft.sm3 import matrix_shape, sm3_
from slivertune.sft.targets import Target

_MOST_COHORTS = 256
"""What one byte can tell apart."""


def regrown(vector: torch.Tensor, stay: torch.Tensor, grown: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A vector along the trained weights, after a reselection.

    Args:
        vector: One value for each old weight, shape (n,).
        stay: int64, sorted: which of them stay.
        grown: Values of the new ones, of the same dtype.
        order: int64: sorts the kept and the new ones by position.

    Returns:
        One value for each weight, in the order of positions.
    """
    return torch.cat([vector.index_select(0, stay), grown]).index_select(0, order)


class Moments(ABC):
    """State of an update rule for one tensor; vectors run along its sorted indices."""

    names: tuple[str, ...]
    """Attributes that are the state."""

    @abstractmethod
    def update(
        self,
        delta: torch.Tensor,
        gradient: torch.Tensor,
        indices: torch.Tensor,
        options: Mapping[str, Any],
        generator: torch.Generator | None = None,
    ) -> None:
        """Apply the rule to the deltas, in place.

        Args:
            delta: fp32, shape (n,).
            gradient: fp32, shape (n,).
            indices: int32, shape (n,), sorted.
            options: Those of the param group.
            generator: What rounds packed state at random.
        """

    @abstractmethod
    def replace(
        self, stay: torch.Tensor, seeds: Estimate | None, order: torch.Tensor, options: Mapping[str, Any]
    ) -> None:
        """Follow a reselection.

        Args:
            stay: int64, sorted: which of the old entries stay.
            seeds: What AG estimated for the new ones.
            order: int64: sorts the kept and, after them, the new ones by position.
            options: Those of the param group.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by name."""
        return {name: getattr(self, name) for name in self.names}

    def set_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put other tensors in place of the state, by name."""
        for name in self.names:
            setattr(self, name, tensors[name])

    def expected_shapes(self, num_active: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Extents of each state tensor for so many weights of a tensor of that shape; -1 is any."""
        return dict.fromkeys(self.names, (num_active,))


class AdamMoments(Moments):
    """Two moments and an age for every trained weight: 10 bytes.

    Args:
        num_active: Trained weights.
        betas: Decide how wide an age is.
        device: Where the state lies.
    """

    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "age")
    dtype = torch.float32
    """Of the moments."""

    def __init__(self, num_active: int, betas: tuple[float, float], device: torch.device) -> None:
        self.exp_avg = torch.zeros(num_active, dtype=self.dtype, device=device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self._begin_ages(num_active, betas, device)

    def _begin_ages(self, num_active: int, betas: tuple[float, float], device: torch.device) -> None:
        self.age = torch.zeros(num_active, dtype=age_dtype(betas), device=device)

    def _counted(self) -> torch.Tensor:
        """What counts the updates."""
        return self.age

    def _ages(self) -> torch.Tensor:
        """Updates that each weight has had, int32."""
        return self.age.int()

    def _set_ages(self, ages: torch.Tensor) -> None:
        self.age = ages.to(self.age.dtype)

    def update(
        self,
        delta: torch.Tensor,
        gradient: torch.Tensor,
        indices: torch.Tensor,
        options: Mapping[str, Any],
        generator: torch.Generator | None = None,
    ) -> None:
        """One AdamW update in fp32."""
        betas = tuple(options["betas"])
        self._counted().add_(1).clamp_(max=age_limit(betas))
        exp_avg, exp_avg_sq = self.exp_avg.float(), self.exp_avg_sq.float()
        adamw_(
            delta,
            gradient,
            exp_avg,
            exp_avg_sq,
            self._ages(),
            lr=float(options["lr"]),
            betas=betas,
            eps=options["eps"],
            weight_decay=options["weight_decay"],
        )
        if self.dtype == torch.bfloat16:
            assert generator is not None, "packed moments are rounded at random and need a generator"
            self.exp_avg.copy_(rounded_at_random(exp_avg, generator))
            self.exp_avg_sq.copy_(rounded_at_random(exp_avg_sq, generator))

    def replace(
        self, stay: torch.Tensor, seeds: Estimate | None, order: torch.Tensor, options: Mapping[str, Any]
    ) -> None:
        """Grown weights get the moments and the age that the phase gave them."""
        assert seeds is not None, "AdamW's grown weights need the moments of an estimation phase"
        mean, square = seeded_moments(seeds.mean, seeds.mean_square, seeds.num_steps, tuple(options["betas"]))
        self.exp_avg = regrown(self.exp_avg, stay, mean.to(self.dtype), order)
        self.exp_avg_sq = regrown(self.exp_avg_sq, stay, square.to(self.dtype), order)
        ages = self._ages()
        grown = ages.new_full(mean.shape, min(seeds.num_steps, age_limit(tuple(options["betas"]))))
        self._set_ages(regrown(ages, stay, grown, order))


class PackedAdamMoments(AdamMoments):
    """AdamW's state in 5 bytes: two bf16 moments rounded at random, and the number of a cohort.

    Weights that were grown together have one age, so a byte says which of up to 256 cohorts a weight belongs to. Where
    there would be more, the two oldest become one, whose bias corrections differ least.
    """

    names = ("exp_avg", "exp_avg_sq", "cohort", "cohort_ages")
    dtype = torch.bfloat16

    def _begin_ages(self, num_active: int, betas: tuple[float, float], device: torch.device) -> None:
        self.cohort = torch.zeros(num_active, dtype=torch.uint8, device=device)
        self.cohort_ages = torch.zeros(1, dtype=torch.int32, device=device)

    def _counted(self) -> torch.Tensor:
        return self.cohort_ages

    def _ages(self) -> torch.Tensor:
        return self.cohort_ages.index_select(0, self.cohort.int())

    def _set_ages(self, ages: torch.Tensor) -> None:
        cohort_ages, cohort = ages.unique(return_inverse=True)
        self.cohort_ages = cohort_ages[:_MOST_COHORTS]
        self.cohort = cohort.clamp_(max=_MOST_COHORTS - 1).to(torch.uint8)

    def expected_shapes(self, num_active: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """One of each for every weight, and any number of cohorts."""
        return {**super().expected_shapes(num_active, shape), "cohort_ages": (-1,)}


class SM3Accumulators(Moments):
    """One accumulator a row and one a column; with momentum, 4 bytes for every trained weight.

    Args:
        shape: Extents of the dense tensor.
        num_active: Trained weights.
        has_momentum: Whether updates are averaged.
        packed: Whether the averages are kept in bf16, rounded at random.
        device: Where the state lies.
    """

    def __init__(
        self, shape: tuple[int, ...], num_active: int, has_momentum: bool, packed: bool, device: torch.device
    ) -> None:
        num_rows, num_columns = matrix_shape(shape)
        self.rows = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.columns = torch.zeros(num_columns, dtype=torch.float32, device=device)
        dtype = torch.bfloat16 if packed else torch.float32
        self.momentum_buffer = torch.zeros(num_active, dtype=dtype, device=device) if has_momentum else None
        self.names = ("rows", "columns", "momentum_buffer") if has_momentum else ("rows", "columns")

    def update(
        self,
        delta: torch.Tensor,
        gradient: torch.Tensor,
        indices: torch.Tensor,
        options: Mapping[str, Any],
        generator: torch.Generator | None = None,
    ) -> None:
        """One SM3-II update."""
        momentum_buffer = None if self.momentum_buffer is None else self.momentum_buffer.float()
        sm3_(
            delta,
            gradient,
            indices,
            self.rows,
            self.columns,
            momentum_buffer,
            lr=float(options["lr"]),
            momentum=options["momentum"],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
        )
        if self.momentum_buffer is not None and momentum_buffer is not None and generator is not None:
            self.momentum_buffer.copy_(rounded_at_random(momentum_buffer, generator))

    def replace(
        self, stay: torch.Tensor, seeds: Estimate | None, order: torch.Tensor, options: Mapping[str, Any]
    ) -> None:
        """Grown weights begin without momentum; rows and columns go on."""
        if self.momentum_buffer is not None:
            grown = self.momentum_buffer.new_zeros(order.numel() - stay.numel())
            self.momentum_buffer = regrown(self.momentum_buffer, stay, grown, order)

    def expected_shapes(self, num_active: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """One accumulator a row and a column, one momentum a weight."""
        num_rows, num_columns = matrix_shape(shape)
        return {**super().expected_shapes(num_active, shape), "rows": (num_rows,), "columns": (num_columns,)}


def new_moments(target: Target, num_active: int, config: SFTConfig, options: Mapping[str, Any]) -> Moments:
    """Fresh state of the update rule that goes with a way of selection."""
    device = target.parameter.device
    if config.selection == "momentum":
        return SM3Accumulators(target.shape, num_active, options["momentum"] > 0, config.packed, device)
    return (PackedAdamMoments if config.packed else AdamMoments)(num_active, options["betas"], device)
