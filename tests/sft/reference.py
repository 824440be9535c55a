"""SFT written as plainly as it can be: dense arrays for everything, sorted in full, one weight after another.

Nothing here is shared with the package. A tensor's state is a dictionary of dense arrays and a boolean mask; the
selection sorts every entry of a tensor by (magnitude, position) in numpy; AdamW and SM3 run in fp64.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

Gradients = dict[str, torch.Tensor]


class Prescribed(nn.Module):
    """A model whose gradients are what the batch says, whatever its weights: runs can't drift apart by rounding."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            module = nn.Module()
            module.weight = nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype))
            self.add_module(name, module)
        self.bystander = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, gradients: Gradients) -> torch.Tensor:
        parameters = dict(self.named_parameters())
        total = self.bystander.float().sum() * 0.5
        for name, gradient in gradients.items():
            total = total + (parameters[name] * gradient.to(parameters[name].dtype)).float().sum()
        return total


SHAPES = {"first": (13, 17), "second": (9, 31), "third": (40,), "cube": (3, 5, 7)}
NAMES = [f"{name}.weight" for name in SHAPES]


def prescribed_gradients(
    count: int, dtype: torch.dtype = torch.float32, *, seed: int = 1, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> list[Gradients]:
    """Gradients with a lasting part, so that a selection means something, noise, and many ties in bf16."""
    generator = torch.Generator().manual_seed(seed)
    lasting = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    batches = []
    for _ in range(count):
        noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        batches.append({f"{name}.weight": (lasting[name] + noise[name]).to(dtype) for name in shapes})
    return batches


def ranked(values: np.ndarray) -> np.ndarray:
    """Positions by magnitude, largest first, ties by position."""
    return np.lexsort((np.arange(values.size), -np.abs(values)))


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """SM3's covers: of all ways to cut the extents in two, the one with the fewest accumulators."""
    cuts = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, len(shape))]
    return sorted(cuts, key=sum)[0] if cuts else (math.prod(shape), 1)


def reselection_times(selection: str, total: int, interval: int, gamma: int) -> list[int]:
    """The updates after which weights are reselected, one by one from the rule, if any is to come after the first."""
    if not interval or total <= (interval if selection == "momentum" else gamma):
        return []
    if selection == "momentum":
        return [t for t in range(1, total + 1) if t % interval == 0]
    return [t for t in range(1, total + 1) if t == gamma or (t > gamma and t % interval == 0)]


class NaiveSFT:
    """The reference.

    Args:
        weights: Pretrained values by name.
        active: First positions by name.
        options: selection, interval, gamma, alpha, total, lr, betas, eps, weight_decay, momentum, max_norm.
    """

    def __init__(self, weights: dict[str, torch.Tensor], active: dict[str, torch.Tensor], **options: Any) -> None:
        self.options = options
        self.times = reselection_times(options["selection"], options["total"], options["interval"], options["gamma"])
        self.base = {name: value.detach().clone() for name, value in weights.items()}
        self.t = 0
        self.state: dict[str, dict[str, np.ndarray]] = {}
        self.candidates: dict[int, dict[str, dict[int, list[float]]]] = {}
        for name, value in weights.items():
            size = value.numel()
            rows, columns = rows_and_columns(value.shape)
            mask = np.zeros(size, dtype=bool)
            mask[active[name].numpy()] = True
            self.state[name] = {
                "mask": mask,
                "delta": np.zeros(size),
                "m": np.zeros(size),
                "v": np.zeros(size),
                "age": np.zeros(size, dtype=int),
                "rows": np.zeros(rows),
                "columns": np.zeros(columns),
            }

    def weights(self) -> dict[str, torch.Tensor]:
        """What the model must hold: pretrained bits, or pretrained + delta in fp32, rounded once."""
        found = {}
        for name, base in self.base.items():
            delta = torch.from_numpy(self.state[name]["delta"]).float().view(base.shape)
            mask = torch.from_numpy(self.state[name]["mask"]).view(base.shape)
            found[name] = torch.where(mask, (base.float() + delta).to(base.dtype), base)
        return found

    def update(self, micro_batches: Sequence[Gradients]) -> float:
        """One update from the gradients of its micro-batches; returns their norm on the active weights."""
        gamma = self.options["gamma"] if self.options["selection"] == "accumulated_gradient" else 0
        phases = [time for time in self.times if 0 < time - self.t <= gamma]
        parts = {
            name: [micro[name].float().double().numpy().reshape(-1) for micro in micro_batches] for name in self.base
        }
        total = {name: np.sum(each, axis=0) for name, each in parts.items()}
        norm = math.sqrt(sum(float((total[n][s["mask"]] ** 2).sum()) for n, s in self.state.items()))
        limit = self.options.get("max_norm")
        scale = min(1.0, limit / (norm + 1e-6)) if limit is not None else 1.0
        self.t += 1
        for name, state in self.state.items():
            for end in phases:
                self.estimate(end, end != phases[0], name, parts[name], total[name], scale)
            if self.options["selection"] == "momentum":
                self.sm3(state, total[name] * scale)
            else:
                self.adam(state, total[name] * scale)
        if self.t in self.times:
            for name in self.state:
                self.reselect(name)
            self.candidates.pop(self.t, None)
        return norm

    def estimate(
        self, end: int, with_spare: bool, name: str, parts: list[np.ndarray], total: np.ndarray, scale: float
    ) -> None:
        candidates = self.candidates.setdefault(end, {})
        mask = self.state[name]["mask"]
        count = int(mask.sum())
        if name not in candidates:
            chosen = count + (math.ceil(self.options["alpha"] * count) if with_spare else 0)
            pool: dict[int, float] = {}
            for gradient in parts:
                seen = gradient.copy()
                for position, value in pool.items():
                    seen[position] += value
                frozen = [int(position) for position in ranked(seen) if not mask[position]]
                pool = {position: seen[position] for position in frozen[: 2 * count]}
            positions = np.array(sorted(pool))
            order = ranked(np.array([pool[int(position)] for position in positions]))[:chosen]
            first = {int(positions[at]): pool[int(positions[at])] * scale for at in order}
            candidates[name] = {position: [value] for position, value in first.items()}
            return
        for position, values in candidates[name].items():
            values.append(total[position] * scale)

    def adam(self, state: dict[str, np.ndarray], gradient: np.ndarray) -> None:
        b1, b2 = self.options["betas"]
        at = np.flatnonzero(state["mask"])
        state["age"][at] += 1
        age = state["age"][at]
        state["m"][at] = b1 * state["m"][at] + (1 - b1) * gradient[at]
        state["v"][at] = b2 * state["v"][at] + (1 - b2) * gradient[at] ** 2
        step = (state["m"][at] / (1 - b1**age)) / (np.sqrt(state["v"][at] / (1 - b2**age)) + self.options["eps"])
        self.apply(state, at, step)

    def apply(self, state: dict[str, np.ndarray], at: np.ndarray, step: np.ndarray) -> None:
        state["delta"][at] *= 1 - self.options["lr"] * self.options["weight_decay"]
        state["delta"][at] -= self.options["lr"] * step

    def sm3(self, state: dict[str, np.ndarray], gradient: np.ndarray) -> None:
        at = np.flatnonzero(state["mask"])
        i, j = np.divmod(at, state["columns"].size)
        nu = np.minimum(state["rows"][i], state["columns"][j]) + gradient[at] ** 2
        np.maximum.at(state["rows"], i, nu)
        np.maximum.at(state["columns"], j, nu)
        step = gradient[at] / (np.sqrt(nu) + self.options["eps"])
        if self.options["momentum"]:
            step = state["m"][at] = self.options["momentum"] * state["m"][at] + (1 - self.options["momentum"]) * step
        self.apply(state, at, step)

    def reselect(self, name: str) -> None:
        state = self.state[name]
        active = np.flatnonzero(state["mask"])
        share = self.options["alpha"] * (self.options["total"] - self.t) / self.options["total"]
        count = active.size if self.t == self.times[0] else int(share * active.size)
        if count == 0:
            return
        # The fp32 deltas decide, as they are what is stored.
        was_active = state["mask"].copy()
        dropped = active[np.lexsort((active, np.abs(state["delta"][active].astype(np.float32))))[:count]]
        for key in ("delta", "m", "v", "age"):
            state[key][dropped] = 0
        state["mask"][dropped] = False
        if self.options["selection"] == "momentum":
            grown = self.best_of_rows(state, was_active, count)
        else:
            grown = self.best(name, was_active, count)
        state["mask"][grown] = True

    def best(self, name: str, was_active: np.ndarray, count: int) -> np.ndarray:
        state, candidates = self.state[name], self.candidates[self.t][name]
        b1, b2 = self.options["betas"]
        free = [position for position in sorted(candidates) if not was_active[position]]
        values = np.array([candidates[position] for position in free])
        order = ranked(values.mean(1).astype(np.float32))[:count]
        grown, values = np.array(free)[order], values[order]
        state["m"][grown] = values.mean(1) * (1 - b1 ** values.shape[1])
        state["v"][grown] = (values**2).mean(1) * (1 - b2 ** values.shape[1])
        state["age"][grown] = values.shape[1]
        return grown

    def best_of_rows(self, state: dict[str, np.ndarray], was_active: np.ndarray, count: int) -> np.ndarray:
        rows, columns = (state[key].astype(np.float32).astype(np.float64) for key in ("rows", "columns"))
        score = np.outer(rows, columns).reshape(-1)
        score[was_active] = -1
        return np.lexsort((np.arange(score.size), -score))[:count]


class FixedAdamW:
    """torch's AdamW on fixed entries of dense weights, which starts from whatever the weights are.

    Args:
        model: Dense.
        deltas: The positions of each trained tensor, by parameter name.
        **options: Of AdamW; nothing decays.
    """

    def __init__(self, model: nn.Module, deltas: Mapping[str, Any], **options: Any) -> None:
        self.model = model
        self.masks = {}
        for name, delta in deltas.items():
            mask = torch.zeros(model.get_parameter(name).shape, dtype=torch.bool)
            mask.view(-1)[delta.indices.long()] = True
            self.masks[name] = mask
        self.adamw = torch.optim.AdamW([model.get_parameter(name) for name in deltas], weight_decay=0.0, **options)

    def train(self, batches: Sequence[Any]) -> None:
        """Update once for each batch."""
        for batch in batches:
            self.model(**batch).loss.backward()
            for name, mask in self.masks.items():
                self.model.get_parameter(name).grad.mul_(mask)
            self.adamw.step()
            self.model.zero_grad()
