"""Averaging of gradients over the ranks: at the end of a backward, and inside it while candidates are chosen."""

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
"""Number of elements averaged together (64 MiB), which bounds the temporary of an update's averages."""


class GradientSync:
    """Averages the gradients of the deltas over the ranks, so that every rank makes the same update and selection.

    - At the end of the last backward before an update, it averages the gradients of the deltas and of the growth
      candidates by one small all-reduce (or one for each 2^24 elements). Later code, such as clipping, sees means.
    - In the backwards of an estimation phase's first update, it chooses the candidates. A tensor's dense gradient
      exists only in its hook, so the ranks meet there: each names the largest entries of its own gradient, and the
      values of all ranks at all these positions are averaged.

    The ranks meet by the tensor's number. If a rank has no gradient for it (an expert without a token), that rank joins
    with zeros before it goes on. So the ranks need not have the same tensors, nor the same order.

    In a single process, all of this does nothing.

    Args:
        weights: The trained tensors.
        delta_parameters: Counter of the updates.
    """

    def __init__(self, weights: Sequence[SparseWeight], delta_parameters: DeltaParameters) -> None:
        self.communicator: Communicator = ALONE
        self._weights = weights
        self._delta_parameters = delta_parameters
        self._waits_for_end = False
        self.has_own = False
        """Whether there are gradients of this rank that are not averaged yet."""

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Register hooks that see backwards begin at the model's outputs.

        Only code inside a backward can wait for its end, and inside a reentrant checkpoint that is the end of the
        checkpoint's own backward. Without these hooks averaging happens there: too often, but correctly.
        """

        def before(module: nn.Module, inputs: Any) -> None:
            # A backward that raised has not reached its end.
            self._waits_for_end = False

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            for leaf in tensors_of(output):
                if leaf.requires_grad:
                    leaf.register_hook(lambda gradient: self._await_end())

        return [model.register_forward_pre_hook(before), model.register_forward_hook(after)]

    def begin(self) -> int:
        """Record that a gradient arrives, and schedule its averaging.

        Returns:
            Number of the running update.

        Raises:
            RuntimeError: If other ranks train and nothing averages.
        """
        if self.communicator.is_alone:
            self.communicator.check()
        else:
            self.has_own = True
            self._await_end()
        return self._delta_parameters.begin()

    def show(self, at: int, gradient: torch.Tensor, start: int, active: torch.Tensor, serial: int) -> None:
        """Show a part of a dense gradient to the tensor's growth estimators, which only read it.

        Args:
            at: Number of the tensor.
            gradient: Part of the gradient, any floating dtype, shape (n,), contiguous; the parts come in order.
            start: Position of its first element in the flattened tensor.
            active: Trained positions of the tensor, int32, sorted.
            serial: Number of the running update.
        """
        for end, estimator in self._weights[at].estimators.items():
            estimator.begin(serial)
            if estimator.has_candidates:
                estimator.feed(gradient, start, active)
                continue
            self._join_until(ChunkKey(at, end, start, gradient.numel()))
            estimator.feed(gradient, start, active, self.communicator)
            if start + gradient.numel() == self._weights[at].target.num_elements:
                estimator.end_backward(self.communicator)

    def _join_until(self, key: ChunkKey) -> None:
        """Join in the exchanges of other ranks that come before a chunk."""
        while (first := self.communicator.earliest(key, self._weights[0].device)) != key:
            weight = self._weights[first.weight]
            estimator = weight.estimators[first.end]
            weight.follow(weight.device)
            estimator.begin(self._delta_parameters.begin())
            estimator.join(first.start, first.length, weight.device, self.communicator)
            if first.start + first.length == weight.target.num_elements:
                estimator.end_backward(self.communicator)

    def _await_end(self) -> None:
        if self._waits_for_end or self.communicator.is_alone:
            return
        if self.communicator.is_last() or self._lacks_candidates():
            self.communicator.meet()  # the other ranks meet in this backward, too
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
        """Average the gathered gradients of some tensors, except tensors without a gradient on any rank."""
        present = [float(weight.phi.grad is not None) for weight in weights]
        is_present = torch.tensor(present, dtype=torch.float32, device=weights[0].device)
        gathered = [_gathered(weight, self._delta_parameters.serial) for weight in weights]
        self.communicator.mean_([is_present, *(tensor for tensors in gathered for tensor in tensors)])
        for weight, tensors, share in zip(weights, gathered, is_present.tolist(), strict=True):
            if share:
                _replace_gathered(weight, tensors, self._delta_parameters.begin())


def _gathered(weight: SparseWeight, serial: int) -> list[torch.Tensor]:
    """Return the running update's accumulated gradients, fp32: phi's, and those of each phase's candidates.

    Gradients that did not arrive are zeros. The tensors are live where possible.
    """
    own = weight.phi.grad
    if own is None:
        own = torch.zeros(weight.num_active, dtype=torch.float32, device=weight.device)
    running = (estimator.running(serial) for estimator in weight.estimators.values())
    return [own, *(each for each in running if each is not None)]


def _replace_gathered(weight: SparseWeight, averaged: Sequence[torch.Tensor], serial: int) -> None:
    """Replace the tensors that `_gathered` returned by their averages."""
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
