"""SFT on ranks, written plainly: the naive reference over mean gradients, with each rank's own entries for the pool."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.models import bits
from tests.helpers.tolerance import assert_step_close, assert_sums_close, sum_limit
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
        unit = torch.eye(self.linear.in_features, dtype=gradient.dtype, device=gradient.device)
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


CAP = 1e-4
"""What no limit exceeds: rows of one rank left out of one update change state and norms by a tenth and more."""


def assert_state_is(state: dict[str, Any], naive: NaiveSFT) -> None:
    """Positions and ages exactly; the state to what ten roundings of each fp32 update add up to, against fp64.

    For gradients that are prescribed.
    """
    for kinds in _chosen(state, naive).values():
        for kind, (own, want) in kinds.items():
            size = {"delta": naive.t * naive.options["lr"], "rows": want, "columns": want}.get(kind)
            assert_sums_close(own, want, 10 * naive.t, size=size)


def assert_state_is_near(state: dict[str, Any], naive: NaiveSFT, exact: NaiveSFT) -> None:
    """Positions and ages exactly; the state to a few times what the order of sums changes in the gradients.

    Args:
        state: Of a run over a model's own gradients.
        naive: The reference over the gradients of one process.
        exact: The same with exact sums.
    """
    found = _chosen(state, naive)
    others = _chosen(state, naive, exact)
    for kind in next(iter(found.values())):
        own, wanted = ({name: kinds[kind][at] for name, kinds in found.items()} for at in (0, 1))
        assert_step_close(own, wanted, {name: kinds[kind][1] for name, kinds in others.items()}, cap=CAP)


def _chosen(
    state: dict[str, Any], naive: NaiveSFT, other: NaiveSFT | None = None
) -> dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Each tensor's state and the reference's, by kind; another reference's values where the first has chosen."""
    found: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, expected in naive.state.items():
        own, values = state[name], (other or naive).state[name]
        active = np.flatnonzero(expected["mask"])
        assert own["indices"].tolist() == active.tolist(), name
        pairs = {"delta": "delta"}
        found[name] = {}
        if naive.options["selection"] == "momentum":
            found[name] = {key: (own[key], torch.from_numpy(values[key])) for key in ("rows", "columns")}
        else:
            assert own["age"].tolist() == expected["age"][active].tolist(), name
            pairs |= {"exp_avg": "m", "exp_avg_sq": "v"}
        for ours, theirs in pairs.items():
            found[name][ours] = own[ours], torch.from_numpy(values[theirs][active])
    return found


def assert_norms_are(found: list[float], norms: list[float], naive: NaiveSFT, accumulation: int) -> None:
    """Norms of prescribed gradients are those in fp64 but for the order of their squares' sum."""
    num_terms = accumulation + sum(int(state["mask"].sum()) for state in naive.state.values())
    assert found == pytest.approx(norms, rel=sum_limit(num_terms, torch.float32))


def assert_merged(weights: dict[str, torch.Tensor], state: dict[str, Any], naive: NaiveSFT) -> None:
    """The weights are the pretrained bits, and where a delta is, the sum with it, rounded once."""
    for name, base in naive.base.items():
        expected = base.clone().view(-1)
        at = state[name]["indices"].long()
        expected[at] = (expected[at].float() + state[name]["delta"].float()).to(base.dtype)
        assert torch.equal(bits(weights[name]), bits(expected.view(base.shape))), name
