"""SFT on ranks, written plainly: the naive reference over mean gradients, with each rank's own entries for the pool."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.sft.reference import Gradients, NaiveSFT, ranked

SHAPES = {"first": (13, 17), "second": (31, 9), "third": (24, 20)}
NAMES = [f"blocks.{name}.linear.weight" for name in SHAPES]


class PrescribedBlock(nn.Module):
    """One linear layer, as a block of a model."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, rows, bias=False)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        # Over the unit matrix, so that the weight's gradient is the given one to the bit.
        unit = torch.eye(self.linear.in_features, dtype=gradient.dtype)
        return (self.linear(unit) * gradient.t()).float().sum()


class PrescribedLayers(nn.Module):
    """Linear layers whose gradients are what the batch says, whatever their weights; a layer may be left out."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: PrescribedBlock(*shape) for name, shape in SHAPES.items()})
        self.bystander = nn.Parameter(torch.ones(3))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).to(dtype)

    def forward(self, gradients: Gradients) -> torch.Tensor:
        total = self.bystander.float().sum() * 0.5
        for name, gradient in gradients.items():
            total = total + self.blocks[name.split(".")[1]](gradient)
        return total


def rank_gradients(
    update: int, micro: int, rank: int, dtype: torch.dtype = torch.float32, *, noise: float = 1.0
) -> Gradients:
    """What one rank's micro-batch gives: small multiples of 6 / 64.

    Sums over 2 or 3 ranks and 2 micro-batches are exact in fp32, so that ranks and reference can't differ by rounding;
    many entries tie.
    """
    found = {}
    for number, (name, shape) in enumerate(zip(NAMES, SHAPES.values(), strict=True)):
        lasting = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        own = torch.Generator().manual_seed(1000 * update + 100 * micro + 10 * rank + number + 7)
        mixed = lasting + noise * torch.randn(shape, generator=own)
        found[name] = ((mixed * 10).round().clamp(-42, 42) * 6 / 64).to(dtype)
    return found


class RanksNaive(NaiveSFT):
    """The reference on ranks: `update` gets what each rank had in each micro-batch."""

    own: list[list[Gradients]]

    def update_on_ranks(self, micro_batches: list[list[Gradients]]) -> float:
        """One update.

        Args:
            micro_batches: For each micro-batch each rank's gradients; a name that a rank lacks counts as zeros.

        Returns:
            The norm of the mean gradient on the active weights.
        """
        self.own = micro_batches
        return self.update([self.mean(ranks) for ranks in micro_batches])

    def mean(self, ranks: list[Gradients]) -> Gradients:
        zeros = {name: torch.zeros(base.shape) for name, base in self.base.items()}
        return {
            name: torch.stack([each.get(name, zero).float() for each in ranks]).mean(0) for name, zero in zeros.items()
        }

    def estimate(
        self, end: int, with_spare: bool, name: str, parts: list[np.ndarray], total: np.ndarray, scale: float
    ) -> None:
        candidates = self.candidates.setdefault(end, {})
        if name in candidates:
            super().estimate(end, with_spare, name, parts, total, scale)
            return
        mask = self.state[name]["mask"]
        count = int(mask.sum())
        chosen = count + (math.ceil(self.options["alpha"] * count) if with_spare else 0)
        pool: dict[int, float] = {}
        for mean, ranks in zip(parts, self.own, strict=True):
            free = [at for at in range(mean.size) if not mask[at] and at not in pool]
            newcomers: set[int] = set()
            for each in ranks:
                if name in each:
                    local = each[name].float().double().numpy().reshape(-1)
                    newcomers |= {free[at] for at in ranked(local[free])[: 2 * count]}
            for position in pool:
                pool[position] += mean[position]
            pool |= {position: mean[position] for position in newcomers}
            positions = sorted(pool)
            best = ranked(np.array([pool[position] for position in positions]))[: 2 * count]
            pool = {positions[at]: pool[positions[at]] for at in best}
        positions = sorted(pool)
        order = ranked(np.array([pool[position] for position in positions]))[:chosen]
        candidates[name] = {positions[at]: [pool[positions[at]] * scale] for at in sorted(order)}


def assert_state_is(state: dict[str, Any], naive: NaiveSFT) -> None:
    """Positions and ages exactly; the state to what ten roundings of each fp32 update add up to, against fp64."""
    for name, expected in naive.state.items():
        own = state[name]
        active = np.flatnonzero(expected["mask"])
        assert own["indices"].tolist() == active.tolist(), name
        pairs = [("delta", "delta")]
        if naive.options["selection"] == "momentum":
            for key in ("rows", "columns"):
                torch.testing.assert_close(own[key].double(), torch.from_numpy(expected[key]), rtol=1e-5, atol=1e-10)
        else:
            assert own["age"].tolist() == expected["age"][active].tolist(), name
            pairs += [("exp_avg", "m"), ("exp_avg_sq", "v")]
        for ours, theirs in pairs:
            want = torch.from_numpy(expected[theirs][active])
            torch.testing.assert_close(own[ours].double(), want, rtol=1e-4, atol=1e-7)


def assert_weights_are(weights: dict[str, torch.Tensor], naive: NaiveSFT) -> None:
    """Inactive weights to the bit; active ones to one unit in the last place, where two sums round to other sides."""
    for name, expected in naive.weights().items():
        mask = torch.from_numpy(naive.state[name]["mask"]).view(expected.shape)
        assert torch.equal(weights[name][~mask], naive.base[name][~mask]), name
        unit = torch.finfo(expected.dtype).eps
        torch.testing.assert_close(weights[name].float(), expected.float(), rtol=unit, atol=1e-6)
