"""Averages over the ranks the gradients of whatever trains now, while backward makes them.

For a model that every rank holds whole, without DistributedDataParallel: first its weights are made those of rank 0.
Nothing is allocated for what is frozen: gradients are copied into buckets of a fixed size, at most two of which are
under way at a time. Buckets start in the same order on every rank, whatever order the gradients arrive in.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.core.outputs import tensors_of
from slivertune.core.torch_internals import at_end_of_backward
from slivertune.hift.offloaded_gradient import OffloadedGradient
from slivertune.hift.waiting_weight import WaitingWeight
from slivertune.parallel.consistency.heartbeat import Heartbeat, guard, world_size

BUCKET_BYTES = 25 * 2**20
"""Bytes of a bucket; what DistributedDataParallel takes."""

_MOST_UNDER_WAY = 2


@torch.no_grad()
def broadcast_from_first(
    model: nn.Module,
    device: torch.device | None = None,
    waiting_weight: Callable[[torch.Tensor], WaitingWeight | None] = lambda parameter: None,
) -> None:
    """Make every parameter and buffer that of rank 0. A collective.

    Args:
        model: The same on every rank, but for its values.
        device: Where ranks speak to each other, of a model whose weights wait elsewhere in part; None: where they lie.
        waiting_weight: Gives what holds a parameter in fewer bits; its exact weight is sent.
    """
    if world_size() == 1:
        return
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        waiting = waiting_weight(tensor)
        exact = tensor if waiting is None else waiting.exact()
        contiguous = exact.detach().to(device or tensor.device).contiguous()
        with guard("sending the weights of rank 0"):
            dist.broadcast(contiguous, src=0)
        if waiting is not None:
            waiting.write(contiguous)
        elif contiguous.data_ptr() != tensor.data_ptr():
            tensor.copy_(contiguous)


class BucketedAllReduce:
    """Averages gradients over the ranks; `remove` takes it off the model.

    When a backward pass ends, the gradient of every parameter that trains is the mean over the ranks, where a rank
    without a gradient counts as zeros; a gradient that no rank has stays None. Since the mean is linear, it may be
    taken after every micro-batch or, with `is_due`, after the last one only.

    Args:
        model: Its outputs tell when a backward pass begins.
        parameters: What may train, in the same order on every rank; those that require a gradient are synchronized.
        heartbeat: Explains a collective that fails.
        is_due: Whether the backward pass that begins now ends with a synchronization; the same on every rank.
        meet: Called when one begins; raises where the ranks are not at the same place, before anything is averaged.
        bucket_bytes: Bytes of one bucket; larger gradients are cut. None takes `BUCKET_BYTES`.
        start_mean: Begins to replace a flat tensor by its mean over the ranks, and returns what `wait` is called of;
            None takes an all-reduce of the default process group.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        heartbeat: Heartbeat,
        *,
        is_due: Callable[[], bool] = lambda: True,
        meet: Callable[[], None] = lambda: None,
        bucket_bytes: int | None = None,
        start_mean: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self._start_mean = start_mean
        self._parameters = tuple(parameters)
        self._heartbeat = heartbeat
        self._is_due = is_due
        self._meet = meet
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._handles: list[RemovableHandle] = [model.register_forward_hook(self._mark_outputs)]
        for parameter in self._parameters:
            # A hook stays through freezing and unfreezing, but can only be set on what requires a gradient.
            required = parameter.requires_grad
            parameter.requires_grad_(True)
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._arrived))
            parameter.requires_grad_(required)
        self._reset([], is_running=False)

    def remove(self) -> None:
        """Take the hooks off the model; gradients stay local from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin_backward(self) -> None:
        """Note, inside of a backward pass, that it began; more than once in a pass does no harm.

        The model's outputs tell by themselves where they require a gradient and are found; a pass that does not reach
        this rank's parameters has to take part as well.
        """
        # From the outermost pass: reentrant checkpointing runs passes of its own inside it, whose ends are not the end.
        if not self._is_running and self._is_due():
            self._meet()
            self._reset(_fill_buckets(self._parameters, self._bucket_bytes), is_running=True)
            at_end_of_backward(self._finish)

    def _mark_outputs(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._is_running:  # a backward pass that raised
            self._reset([], is_running=False)
        for output in tensors_of(outputs):
            if output.requires_grad:
                output.register_hook(lambda _: self.begin_backward())

    def _arrived(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self.begin_backward()
        if not self._is_running:
            return
        for bucket in self._of_parameter.get(parameter, ()):
            bucket.arrived(parameter)
        while self._waiting and not self._waiting[0].missing:
            self._start(self._waiting.popleft())

    def _reset(self, buckets: list[_Bucket], *, is_running: bool) -> None:
        self._is_running = is_running
        self._buckets = buckets
        self._waiting = deque(buckets)
        self._under_way: deque[_Bucket] = deque()
        self._of_parameter: defaultdict[torch.Tensor, list[_Bucket]] = defaultdict(list)
        for bucket in buckets:
            for parameter in bucket.parameters:
                self._of_parameter[parameter].append(bucket)

    def _start(self, bucket: _Bucket) -> None:
        with self._heartbeat.guard("averaging gradients"):
            while len(self._under_way) >= _MOST_UNDER_WAY:
                self._under_way.popleft().settle()
            flat = bucket.fill()
            if self._start_mean is not None:
                bucket.work = self._start_mean(flat)
            else:
                # Divided before the sum, which then has the range of one gradient.
                bucket.work = dist.all_reduce(flat.div_(dist.get_world_size()), async_op=True)
        self._under_way.append(bucket)

    def _finish(self) -> None:
        while self._waiting:
            self._start(self._waiting.popleft())
        self._settle_all()
        for bucket in self._buckets:
            if bucket.is_stale:
                self._start(bucket)
        self._settle_all()
        self._is_running = False

    def _settle_all(self) -> None:
        with self._heartbeat.guard("averaging gradients"):
            while self._under_way:
                self._under_way.popleft().settle()


class _Bucket:
    """Parts of gradients that travel together.

    Args:
        parts: Parameters and the elements [start, stop) of their flattened gradients; of one dtype, on one device.
    """

    def __init__(self, parts: Sequence[tuple[nn.Parameter, int, int]]) -> None:
        self._parts = tuple(parts)
        self.missing = set(self.parameters)
        """Those whose gradient has not arrived."""
        self._flat: torch.Tensor | None = None
        self.work: Any = None
        """The mean under way."""
        self._was_started = False
        self.is_stale = False
        """Whether a gradient changed after it was copied: a parameter that is used inside and outside of a reentrant
        checkpoint gets its gradient in two parts."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What has a part in the bucket."""
        return [parameter for parameter, _, _ in self._parts]

    def arrived(self, parameter: nn.Parameter) -> None:
        """Note that a gradient was added to."""
        self.missing.discard(parameter)
        self.is_stale = self._was_started

    def fill(self) -> torch.Tensor:
        """Copy the gradients, to be averaged; those that never arrived travel as they are, or as zeros."""
        first = self._parts[0][0]
        num_elements = sum(stop - start for _, start, stop in self._parts)
        with claimed_at_birth("gradients"):
            # One more element a part: how many ranks have that gradient.
            self._flat = torch.ones(num_elements + len(self._parts), dtype=first.dtype, device=first.device)
        claim(self._flat, "gradients")
        for index, (piece, (parameter, start, stop)) in enumerate(self._pieces(self._flat)):
            gradient = parameter.grad
            if gradient is None:
                piece.zero_()
                self._flat[num_elements + index] = 0
            elif isinstance(gradient, OffloadedGradient):
                piece.copy_(gradient.copy_on_device(start, stop))
            else:
                piece.copy_(_flat_gradient(parameter)[start:stop])
        self._was_started, self.is_stale = True, False
        return self._flat

    def settle(self) -> None:
        """Wait for the mean and write it back."""
        assert self._flat is not None
        self.work.wait()
        flat, self._flat, self.work = self._flat, None, None
        if self.is_stale:
            return
        for (parameter, _, _), count in zip(self._parts, flat[-len(self._parts) :], strict=True):
            # Looked at only where this rank has none: it makes the host wait for the device.
            if parameter.grad is None and count > 0:
                parameter.grad = torch.zeros_like(parameter)
        for piece, (parameter, start, stop) in self._pieces(flat):
            gradient = parameter.grad
            if isinstance(gradient, OffloadedGradient):
                gradient.write(start, stop, piece)
            elif gradient is not None:
                _flat_gradient(parameter)[start:stop].copy_(piece)

    def _pieces(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[nn.Parameter, int, int]]]:
        offset = 0
        for parameter, start, stop in self._parts:
            yield flat[offset : offset + stop - start], (parameter, start, stop)
            offset += stop - start


def _flat_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """A flat view of the gradient, its elements in the same order on every rank: that of the parameter in memory."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise ValueError(
            f"a gradient of shape {tuple(parameter.shape)} is sparse, which can't be averaged in buckets; "
            "set sparse=False on its embedding"
        )
    if parameter.is_contiguous() and gradient.is_contiguous():
        return gradient.view(-1)
    ordered = torch.empty_like(parameter)
    if gradient.stride() != ordered.stride():
        parameter.grad = gradient = ordered.copy_(gradient)
    return gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True)).view(-1)


def _fill_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Cut what trains into buckets, last parameter first, as backward goes."""
    open_parts: dict[tuple[torch.dtype, torch.device], list[tuple[nn.Parameter, int, int]]] = {}
    filled: Counter[tuple[torch.dtype, torch.device]] = Counter()
    buckets = []
    for parameter in reversed(parameters):
        if not parameter.requires_grad:
            continue
        kind = (parameter.dtype, parameter.device)
        capacity = max(1, bucket_bytes // parameter.dtype.itemsize)
        start = 0
        while start < parameter.numel():
            stop = min(parameter.numel(), start + capacity - filled[kind])
            open_parts.setdefault(kind, []).append((parameter, start, stop))
            filled[kind] += stop - start
            start = stop
            if filled[kind] >= capacity:
                buckets.append(_Bucket(open_parts.pop(kind)))
                filled[kind] = 0
    return [*buckets, *(_Bucket(parts) for parts in open_parts.values())]
