"""When the ranks' gradients become one: at the end of a backward, and in it while candidates are being chosen."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slivertune.core.ledger import claim
from slivertune.core.outputs import tensors_of
from slivertune.core.torch_internals import at_end_of_backward
from slivertune.sft.communicator import ALONE, NOWHERE, ChunkKey, Communicator
from slivertune.sft.delta_parameters import DeltaParameters
from slivertune.sft.weight import SparseWeight

BUCKET_ELEMENTS = 2**24
"""Elements that are averaged together, 64 MiB; bounds the temporary of an update's averages."""


class GradientSync:
    """Averages the gradients of the deltas over the ranks, so that every rank does the same update and selection.

    - At the end of the backward that is the last before an update: the deltas' gradients, and those of the growth
      candidates, by one small all-reduce (or one for each 2^24 elements). What comes later, as clipping, sees means.
    - In the backwards of an estimation phase's first update: the candidates. A tensor's dense gradient exists only in
      its hook, so the ranks meet there: each names the largest entries of its own gradient, and the values of all ranks
      at all these positions are averaged.

    The ranks meet by the tensor's number, and where one has no gradient for it (an expert without a token), that rank
    joins with zeros before it goes on; so they need not have the same tensors, nor in the same order.

    Alone, all of this does nothing.

    Args:
        weights: The trained tensors.
        delta_parameters: Counts updates.
    """

    def __init__(self, weights: Sequence[SparseWeight], delta_parameters: DeltaParameters) -> None:
        self.communicator: Communicator = ALONE
        self._weights = weights
        self._delta_parameters = delta_parameters
        self._waits_for_end = False
        self.has_own = False
        """Whether there are gradients that are this rank's alone."""

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """See backwards begin at the model's outputs.

        The end of a backward can be waited for from inside it alone, and inside a reentrant checkpoint that is the end
        of the checkpoint's own. Without this, averaging happens there, too often but rightly.
        """

        def before(module: nn.Module, inputs: Any) -> None:
            # A backward that raised has never come to its end.
            self._waits_for_end = False

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            for leaf in tensors_of(output):
                if leaf.requires_grad:
                    leaf.register_hook(lambda gradient: self._await_end())

        return [model.register_forward_pre_hook(before), model.register_forward_hook(after)]

    def begin(self) -> int:
        """Note that a gradient arrives, and see to it that it is averaged.

        Returns:
            The number of the running update.

        Raises:
            RuntimeError: If other ranks train, and nothing averages.
        """
        if self.communicator.is_alone:
            self.communicator.check()
        else:
            self.has_own = True
            self._await_end()
        return self._delta_parameters.begin()

    def show(self, at: int, gradient: torch.Tensor, start: int, active: torch.Tensor, serial: int) -> None:
        """Show a part of a dense gradient to the tensor's growth estimators; it is only read.

        Args:
            at: The tensor's number.
            gradient: Any floating dtype, shape (n,), contiguous; the parts of a gradient come in order.
            start: Position of its first element in the flattened tensor.
            active: int32, sorted: the tensor's trained positions.
            serial: The running update.
        """
        for end, estimator in self._weights[at].estimators.items():
            estimator.begin(serial)
            if estimator.has_candidates:
                estimator.feed(gradient, start, active)
                continue
            self._join_until(ChunkKey(at, end, start, gradient.numel()))
            estimator.feed(gradient, start, active, self.communicator)
            if start + gradient.numel() == self._weights[at].target.num_elements:
                estimator.end_backward()

    def _join_until(self, key: ChunkKey) -> None:
        """Join in what other ranks have that comes before."""
        while (first := self.communicator.earliest(key, self._weights[0].device)) != key:
            weight = self._weights[first.weight]
            estimator = weight.estimators[first.end]
            weight.follow(weight.device)
            estimator.begin(self._delta_parameters.begin())
            estimator.join(first.start, first.length, weight.device, self.communicator)
            if first.start + first.length == weight.target.num_elements:
                estimator.end_backward()

    def _await_end(self) -> None:
        if self._waits_for_end or self.communicator.is_alone:
            return
        if self.communicator.is_last() or self._lacks_candidates():
            self.communicator.meet()  # as the ranks do in this backward
        self._waits_for_end = True
        at_end_of_backward(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._waits_for_end = False
        if self._lacks_candidates():
            self._join_until(NOWHERE)
        if self.communicator.is_last():
            for bucket in _buckets(self._weights):
                self._average(bucket)
            self.has_own = False

    def _lacks_candidates(self) -> bool:
        return any(not each.has_candidates for weight in self._weights for each in weight.estimators.values())

    def _average(self, weights: Sequence[SparseWeight]) -> None:
        """Average what some tensors gathered; where no rank has a gradient for a tensor, it stays without."""
        present = [float(weight.phi.grad is not None) for weight in weights]
        is_present = torch.tensor(present, dtype=torch.float32, device=weights[0].device)
        gathered = [_gathered(weight, self._delta_parameters.serial) for weight in weights]
        self.communicator.mean_([is_present, *(tensor for tensors in gathered for tensor in tensors)])
        for weight, tensors, share in zip(weights, gathered, is_present.tolist(), strict=True):
            if share:
                _replace_gathered(weight, tensors, self._delta_parameters.begin())


def _gathered(weight: SparseWeight, serial: int) -> list[torch.Tensor]:
    """What the running update's gradients added up to: phi's, and those of each phase's candidates; fp32.

    Zeros where nothing arrived. The tensors are the living ones where that is possible.
    """
    own = weight.phi.grad
    if own is None:
        own = torch.zeros(weight.num_active, dtype=torch.float32, device=weight.device)
    running = (estimator.running(serial) for estimator in weight.estimators.values())
    return [own, *(each for each in running if each is not None)]


def _replace_gathered(weight: SparseWeight, averaged: Sequence[torch.Tensor], serial: int) -> None:
    """Put averages in place of what `_gathered` returned."""
    weight.phi.grad = averaged[0]
    claim(averaged[0], "gradients")
    running = [each for each in weight.estimators.values() if each.has_candidates]
    for estimator, gradients in zip(running, averaged[1:], strict=True):
        estimator.set_running(gradients, serial)


def _buckets(weights: Sequence[SparseWeight]) -> Iterator[list[SparseWeight]]:
    bucket: list[SparseWeight] = []
    size = 0
    for weight in weights:
        candidates = (each.num_candidates for each in weight.estimators.values() if each.has_candidates)
        own = weight.num_active + sum(candidates)
        if bucket and size + own > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += own
    yield bucket
