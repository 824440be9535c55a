"""SFT's growth by its sizes: what depends on values in the real code, with the same tensors for as long.

The rest of SFT runs as it is. Where it searches a gradient for its largest entries, the numbers found follow from the
counts: of the pool, of the candidates, of what a sample of the gradient lets through.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from slivertune.planning.four_bit import CodedLinear
from slivertune.sft import SFT, adam
from slivertune.sft.communicator import ALONE, Communicator
from slivertune.sft.growth import GrowthEstimator
from slivertune.sft.linear import DeltaLayer
from slivertune.sft.model_hooks import ModelHooks
from slivertune.sft.moments import SM3Accumulators, new_moments
from slivertune.sft.reselection import Reselection
from slivertune.sft.selection import PIECE, largest_of, random_indices
from slivertune.sft.targets import Target
from slivertune.sft.weight import SparseWeight


class SizedGrowthEstimator(GrowthEstimator):
    """Follows a tensor's growth candidates without knowing which they are; see `GrowthEstimator`.

    Args:
        num_elements: Elements of the tensor.
        num_active: Its trained weights.
        num_spare: Candidates beyond that.
        packed: Whether to take fewer bytes.
    """

    def __init__(self, num_elements: int, num_active: int, *, num_spare: int = 0, packed: bool = False) -> None:
        super().__init__(num_elements, num_active, num_spare=num_spare, packed=packed)
        self._num_elements = num_elements

    @torch.no_grad()
    @override
    def feed(
        self, gradient: torch.Tensor, start: int, active: torch.Tensor, communicator: Communicator = ALONE
    ) -> None:
        share = gradient.numel() / self._num_elements
        barred = [active[: round(share * active.numel())]]
        if self._indices is not None and self._step is not None:
            known = self._indices[: round(share * self._indices.numel())]
            self._step[: known.numel()] += gradient.index_select(0, known - start).float()
            barred.append(known)
        if not self.has_candidates:
            found = _largest_entries(gradient, self._pool_size, [positions.long() - start for positions in barred])
            self._entrants.append(((found + start).int(), gradient.index_select(0, found).float()))
            self._entrants = [self._merged(self._entrants)]

    @torch.no_grad()
    @override
    def end_step(self, serial: int, scale: torch.Tensor) -> None:
        if self._indices is None or self._step is None or self.has_candidates:
            super().end_step(serial, scale)
            return
        self._step *= scale
        best = largest_of(self._step.abs(), self.num_candidates)
        self._indices = self._indices.new_empty(self.num_candidates)
        first = self._step.new_empty(self.num_candidates)
        del best
        self._sum, self._sum_of_squares = first.to(self._dtype), first.square().to(self._dtype)
        self._step = torch.zeros_like(first)
        self.claim()
        self._serial = -1
        self.num_steps += 1

    def _merged(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        if len(parts) == 1:
            return parts[0]
        indices = torch.cat([indices for indices, _ in parts])
        values = torch.cat([values for _, values in parts])
        indices, order = indices.sort()
        values = values[order]
        count = min(self._pool_size, indices.numel())
        largest_of(values.abs(), count)
        return indices.new_empty(count), values.new_empty(count)


class SizedReselection(Reselection):
    """Takes what a reselection takes, and chooses nothing; see `Reselection`."""

    estimator_class = SizedGrowthEstimator

    @override
    def reselect(self, updates: int, options: Mapping[str, Any]) -> None:
        proposals = []
        for weight in self._weights:
            estimator = weight.estimators.pop(updates, None)
            count = weight.num_active
            if isinstance(weight.moments, SM3Accumulators):
                searched = 2 * count
                products = [torch.empty(searched, dtype=torch.float64), torch.empty(searched, dtype=torch.int64)]
                largest_of(products[0], searched - 1)
                kept = [torch.empty(count, dtype=torch.int32), torch.empty(count)]
                del products
            elif estimator is not None:
                estimate = estimator.estimate()
                kept = [torch.empty(count, dtype=torch.int32), torch.empty(count), torch.empty(count)]
                del estimate
                kept.append(kept[1].abs())
            else:
                continue
            dropped = largest_of(-weight.phi.data.abs(), count)
            proposals.append((dropped, kept))


class _CodedDeltaLayer(DeltaLayer):
    """The layer form beside 4-bit weights: each product makes a dense copy, to which it adds the deltas."""

    @override
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).to(inputs.dtype)

    @override
    def _compute_dtype(self, inputs: torch.Tensor) -> torch.dtype:
        if torch.is_autocast_enabled("cpu"):
            return torch.get_autocast_dtype("cpu")
        module = self.weight.target.module
        assert isinstance(module, CodedLinear)
        return module.compute_dtype

    @override
    @contextmanager
    def matrix(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        module = self.weight.target.module
        assert isinstance(module, CodedLinear)
        phi, indices = self.weight.phi.data, self.weight.indices.long()
        dense = torch.empty(self.weight.target.shape, dtype=module.stored_dtype)
        sums = dense.take(indices).float() + phi
        yield dense.put_(indices, sums.to(dense.dtype)).to(dtype)


class SizedHooks(ModelHooks):
    """Adds deltas beside 4-bit weights that are sizes alone; see `ModelHooks`."""

    layer_class = _CodedDeltaLayer


class SizedSFT(SFT):
    """SFT over a model without data, in either form."""

    reselection_class = SizedReselection
    hooks_class = SizedHooks

    @override
    def _new_weight(self, target: Target, count: int, options: Mapping[str, Any]) -> SparseWeight:
        if not isinstance(target.module, CodedLinear):
            return super()._new_weight(target, count, options)
        indices = random_indices(target.name, target.num_elements, count, self.config.seed)
        return SparseWeight(target, indices, new_moments(target, count, self.config, options), merged=False)


@contextmanager
def without_kept_tensors() -> Iterator[None]:
    """Lets no tensor that SFT keeps between calls pass from a run into a plan, or back."""
    adam._corrections.cache_clear()
    try:
        yield
    finally:
        adam._corrections.cache_clear()


def show_dense_shapes(model: nn.Module) -> None:
    """Give layers in 4 bits a weight of the dense shape, which is what SFT asks for, with no memory of its own.

    Args:
        model: The model; its codes become buffers.
    """
    for module in model.modules():
        if isinstance(module, CodedLinear):
            module.register_buffer("codes", module.weight.data)
            value = torch.empty(1, dtype=module.stored_dtype)
            module.weight = nn.Parameter(value.expand(module.out_features, module.in_features))


def _largest_entries(flat: torch.Tensor, count: int, barred: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `slivertune.sft.selection.largest_entries`, which reads a sample to know how many entries to look at."""
    total, num_barred = flat.numel(), sum(positions.numel() for positions in barred)
    count = max(0, min(count, total - num_barred))
    num_sampled = min(total, max(4096, total // 256))
    sample = flat.new_empty(num_sampled)
    rank = num_sampled * min(count + num_barred, total) / total
    num_found = min(total, int(total * (rank + 4.0 * rank**0.5 + 4.0) / num_sampled) + 1) - num_barred
    num_found = max(count, num_found)
    found = [torch.empty(part, dtype=torch.int64) for part in _parts_of(num_found, total)]
    piece = flat[:PIECE]
    masks = [~(piece.abs() < sample[0]), piece != 0]
    del masks
    positions = torch.cat(found)
    del found
    magnitudes = flat.index_select(0, positions).abs_().float()
    chosen = largest_of(magnitudes, count)
    result = torch.empty(count, dtype=torch.int64)
    del chosen
    return result


def _parts_of(count: int, total: int) -> list[int]:
    """`count` entries spread over the pieces of a tensor of `total` elements."""
    num_pieces = -(-total // PIECE)
    return [count // num_pieces + (at < count % num_pieces) for at in range(num_pieces)]
