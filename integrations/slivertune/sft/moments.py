"""State of the two update rules for a tensor's trained weights: AdamW's moments and ages, SM3's accumulators."""

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
"""Number of cohorts that one byte can tell apart."""


def regrown(vector: torch.Tensor, grown: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a vector along the trained weights after a reselection.

    Args:
        vector: Values of the old weights, one each, shape (n,).
        grown: Values of the new weights, of the same dtype, shape (m,).
        order: Place of each weight's value in the old and then the new ones, in the order of positions, int64.
    """
    return torch.cat([vector, grown]).index_select(0, order)


class Moments(ABC):
    """State of an update rule for one tensor, in vectors along its sorted indices."""

    names: tuple[str, ...]
    """Names of the attributes that form the state."""

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
            delta: Deltas, fp32, shape (n,).
            gradient: Gradient, fp32, shape (n,).
            indices: Positions, int32, shape (n,), sorted.
            options: Options of the param group.
            generator: Source of randomness for the rounding of packed state.
        """

    @abstractmethod
    def replace(self, num_grown: int, seeds: Estimate | None, order: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Adapt the state to a reselection.

        Args:
            num_grown: Number of entries that may be new.
            seeds: AG's estimate for them.
            order: Place of each entry among the old and then the new ones, in the order of positions, int64.
            options: Options of the param group.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state by name."""
        return {name: getattr(self, name) for name in self.names}

    def set_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by tensors of the same names."""
        for name in self.names:
            setattr(self, name, tensors[name])

    def expected_shapes(self, num_active: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the state tensors' shapes for `num_active` weights of a tensor of `shape`, with -1 for any extent."""
        return dict.fromkeys(self.names, (num_active,))


class AdamMoments(Moments):
    """Two moments and an age for every trained weight: 10 bytes per weight.

    Args:
        num_active: Number of trained weights.
        betas: Decay rates, which decide the width of an age.
        device: Device of the state.
    """

    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "age")
    dtype = torch.float32
    """Dtype of the moments."""

    def __init__(self, num_active: int, betas: tuple[float, float], device: torch.device) -> None:
        self.exp_avg = torch.zeros(num_active, dtype=self.dtype, device=device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self._begin_ages(num_active, betas, device)

    def _begin_ages(self, num_active: int, betas: tuple[float, float], device: torch.device) -> None:
        self.age = torch.zeros(num_active, dtype=age_dtype(betas), device=device)

    def _counted(self) -> torch.Tensor:
        """Return the tensor that counts the updates."""
        return self.age

    def _ages(self) -> torch.Tensor:
        """Return the number of updates that each weight has had, int32."""
        return self.age.int()

    def update(
        self,
        delta: torch.Tensor,
        gradient: torch.Tensor,
        indices: torch.Tensor,
        options: Mapping[str, Any],
        generator: torch.Generator | None = None,
    ) -> None:
        """Apply one AdamW update in fp32."""
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

    def replace(self, num_grown: int, seeds: Estimate | None, order: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Give grown weights the moments and the age from the estimation phase."""
        assert seeds is not None, "AdamW's grown weights need the moments of an estimation phase"
        betas = tuple(options["betas"])
        mean, square = seeded_moments(seeds.mean, seeds.mean_square, seeds.num_steps, betas)
        self.exp_avg = regrown(self.exp_avg, mean.to(self.dtype), order)
        self.exp_avg_sq = regrown(self.exp_avg_sq, square.to(self.dtype), order)
        limit = age_limit(betas)
        self._grow_ages(num_grown, min(seeds.num_steps, limit), limit, order)

    def _grow_ages(self, num_grown: int, age: int, limit: int, order: torch.Tensor) -> None:
        self.age = regrown(self.age, self.age.new_full((num_grown,), age), order)


class PackedAdamMoments(AdamMoments):
    """AdamW's state in 5 bytes per trained weight: two bf16 moments with stochastic rounding, and a cohort's number.

    Weights that were grown together have one age, so 1 byte says which of up to 256 cohorts a weight belongs to. If
    there would be more, the two oldest cohorts become one, since their bias corrections differ least.
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

    def _grow_ages(self, num_grown: int, age: int, limit: int, order: torch.Tensor) -> None:
        former = self._ages()
        ages = regrown(former, former.new_full((num_grown,), age), order)
        known = torch.cat([self.cohort_ages, former.new_full((1,), age)]).sort().values
        # An age that no weight has any longer becomes the largest, so that it is cut off before any other.
        is_gone = torch.ones_like(known, dtype=torch.bool).index_fill_(0, torch.searchsorted(known, ages), False)
        self.cohort_ages = known.masked_fill_(is_gone, limit).sort().values[:_MOST_COHORTS]
        cohort = torch.searchsorted(self.cohort_ages, ages)
        self.cohort = cohort.clamp_(max=_MOST_COHORTS - 1).to(torch.uint8)

    def expected_shapes(self, num_active: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return shapes with one value per weight, and any number of cohorts."""
        return {**super().expected_shapes(num_active, shape), "cohort_ages": (-1,)}


class SM3Accumulators(Moments):
    """One accumulator per row and per column, and with momentum 4 bytes per trained weight (2 if packed).

    Args:
        shape: Shape of the dense tensor.
        num_active: Number of trained weights.
        has_momentum: Whether updates are averaged.
        packed: Whether the averages are stored in bf16, with stochastic rounding.
        device: Device of the state.
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
        """Apply one SM3-II update."""
        if options["momentum"] > 0 and self.momentum_buffer is None:
            raise RuntimeError(
                f"momentum was set to {options['momentum']:g} after SFT was built without it, maybe by a scheduler "
                "that cycles it. Pass cycle_momentum=False to the scheduler, or build SFT with momentum"
            )
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

    def replace(self, num_grown: int, seeds: Estimate | None, order: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Start grown weights without momentum, and keep rows and columns."""
        if self.momentum_buffer is not None:
            self.momentum_buffer = regrown(self.momentum_buffer, self.momentum_buffer.new_zeros(num_grown), order)

    def expected_shapes(self, num_active: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one accumulator per row and per column, and of one momentum per weight."""
        num_rows, num_columns = matrix_shape(shape)
        return {**super().expected_shapes(num_active, shape), "rows": (num_rows,), "columns": (num_columns,)}


def new_moments(target: Target, num_active: int, config: SFTConfig, options: Mapping[str, Any]) -> Moments:
    """Make fresh state of the update rule that belongs to the selection criterion."""
    device = target.parameter.device
    if config.selection == "momentum":
        return SM3Accumulators(target.shape, num_active, options["momentum"] > 0, config.packed, device)
    return (PackedAdamMoments if config.packed else AdamMoments)(num_active, options["betas"], device)
