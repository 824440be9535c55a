"""Gradient averaging over the ranks during the backward pass, for the parameters that train in this step.

It replaces DistributedDataParallel for a model that every rank holds whole. The weights of rank 0 are broadcast first.
Frozen parameters allocate nothing: gradients are copied into buckets of a fixed size, of which at most two are in
flight. Buckets start in the same order on every rank, in whatever order the gradients arrive.
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

from slivertune.core.layout import world_size
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.core.outputs import tensors_of
from slivertune.core.torch_internals import at_end_of_backward
from slivertune.hift.offloaded_gradient import OffloadedGradient
from slivertune.parallel.consistency.heartbeat import Heartbeat, guard
from slivertune.parked.quantized_weight import held_by

BUCKET_BYTES = 25 * 2**20
"""Bytes per bucket, as in DistributedDataParallel."""

_MOST_UNDER_WAY = 2


@torch.no_grad()
def broadcast_from_first(model: nn.Module, device: torch.device | None = None) -> None:
    """Copy every parameter and buffer from rank 0 to all ranks, of quantised weights the exact ones. A collective.

    Args:
        model: The model, the same on every rank except for its values.
        device: Device of the communication, for a model whose weights are partly offloaded; None: each tensor's own.
    """
    if world_size() == 1:
        return
    quantized = {id(held.parameter): held for held in map(held_by, model.modules()) if held is not None}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        held = quantized.get(id(tensor))
        exact = tensor if held is None else held.exact()
        contiguous = exact.detach().to(device or tensor.device).contiguous()
        with guard("sending the weights of rank 0"):
            dist.broadcast(contiguous, src=0)
        if held is not None:
            held.write(contiguous)
        elif contiguous.data_ptr() != tensor.data_ptr():
            tensor.copy_(contiguous)


class BucketedAllReduce:
    """Averages gradients over the ranks. `remove` detaches it from the model.

    After a backward pass, the gradient of every parameter that trains is the mean over the ranks. A rank without a
    gradient counts as zeros; a gradient that no rank has stays None. Since the mean is linear, it may be taken after
    every micro-batch or, with `is_due`, after the last one only.

    Args:
        model: Its outputs show when a backward pass begins.
        parameters: Parameters that may train, in the same order on every rank; frozen ones are skipped.
        heartbeat: Explains a failed collective.
        is_due: Whether the backward pass that begins now ends with a synchronization; the same on every rank.
        meet: Function called when such a pass begins; raises before any averaging if the ranks' positions differ.
        on_mean: Function called, inside the backward pass, with each parameter whose whole gradient is the mean now;
            in the same order on every rank.
        bucket_bytes: Bytes per bucket; larger gradients are split. None uses `BUCKET_BYTES`.
        start_mean: Function that starts replacing a flat tensor by its mean over the ranks and returns an object with
            `wait`; None uses an all-reduce of the default process group.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        heartbeat: Heartbeat,
        *,
        is_due: Callable[[], bool] = lambda: True,
        meet: Callable[[], None] = lambda: None,
        on_mean: Callable[[nn.Parameter], None] = lambda parameter: None,
        bucket_bytes: int | None = None,
        start_mean: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self._start_mean = start_mean
        self._parameters = tuple(parameters)
        self._heartbeat = heartbeat
        self._is_due = is_due
        self._meet = meet
        self._on_mean = on_mean
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self.has_own = False
        """Whether gradients have arrived since the last averaging."""
        self._handles: list[RemovableHandle] = [model.register_forward_hook(self._mark_outputs)]
        for parameter in self._parameters:
            # A hook survives freezing and unfreezing, but can only be registered on a tensor that requires a gradient.
            required = parameter.requires_grad
            parameter.requires_grad_(True)
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._arrived))
            parameter.requires_grad_(required)
        self._reset([], is_running=False)

    def remove(self) -> None:
        """Remove the hooks from the model. Gradients stay local from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin_backward(self) -> None:
        """Note, inside a backward pass, that it has begun. Repeated calls in one pass do no harm.

        The model's outputs call this if they require a gradient and are found. A pass that does not reach this rank's
        parameters must take part as well.
        """
        # Called in the outermost pass: reentrant checkpointing runs inner passes, whose end is not the end of backward.
        if not self._is_running and self._is_due():
            self._meet()
            self._reset(_fill_buckets(self._parameters, self._bucket_bytes), is_running=True)
            at_end_of_backward(self._finish)

    def _mark_outputs(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._is_running:  # the last backward pass raised
            self._reset([], is_running=False)
        for output in tensors_of(outputs):
            if output.requires_grad:
                output.register_hook(lambda _: self.begin_backward())

    def _arrived(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self.begin_backward()
        self.has_own = True
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
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._settle_first()
        with self._heartbeat.guard("averaging gradients"):
            flat = bucket.fill()
            if self._start_mean is not None:
                bucket.work = self._start_mean(flat)
            else:
                # Divided before the sum, so that the sum has the range of one gradient.
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
        self._is_running = self.has_own = False

    def _settle_all(self) -> None:
        while self._under_way:
            self._settle_first()

    def _settle_first(self) -> None:
        """Wait for the first mean in flight, and tell of the parameters of which it is the last part."""
        bucket = self._under_way.popleft()
        with self._heartbeat.guard("averaging gradients"):
            bucket.settle()
        for parameter in bucket.parameters if not bucket.is_stale else ():
            if parameter.grad is not None and all(each.is_settled for each in self._of_parameter[parameter]):
                self._on_mean(parameter)


class _Bucket:
    """Parts of gradients that are averaged together.

    Args:
        parts: Parameters and the elements [start, stop) of their flattened gradients; of one dtype, on one device.
    """

    def __init__(self, parts: Sequence[tuple[nn.Parameter, int, int]]) -> None:
        self._parts = tuple(parts)
        self.missing = set(self.parameters)
        """Parameters whose gradient has not arrived."""
        self._flat: torch.Tensor | None = None
        self.work: Any = None
        """Handle of the averaging in flight."""
        self._was_started = False
        self.is_settled = False
        """Whether the parts of the gradients are the mean, and nothing was added to them since."""
        self.is_stale = False
        """Whether a gradient changed after it was copied: a parameter used inside and outside a reentrant checkpoint
        gets its gradient in two parts."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters with a part in the bucket."""
        return [parameter for parameter, _, _ in self._parts]

    def arrived(self, parameter: nn.Parameter) -> None:
        """Note that a gradient was accumulated."""
        self.missing.discard(parameter)
        self.is_stale, self.is_settled = self._was_started, False

    def fill(self) -> torch.Tensor:
        """Copy the gradients into a flat tensor. Missing gradients count as zeros."""
        first = self._parts[0][0]
        num_elements = sum(stop - start for _, start, stop in self._parts)
        with claimed_at_birth("gradients"):
            # One more element per part: the share of the ranks that have that gradient.
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
        self.is_settled = True
        for (parameter, _, _), count in zip(self._parts, flat[-len(self._parts) :], strict=True):
            # Checked only if this rank has no gradient: it makes the host wait for the device.
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
    """Return a flat view of the gradient, in the parameter's memory order, which is the same on every rank."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise ValueError(
            f"a gradient of shape {tuple(parameter.shape)} is sparse and can't be averaged in buckets. "
            "Set sparse=False on its embedding"
        )
    if parameter.is_contiguous() and gradient.is_contiguous():
        return gradient.view(-1)
    ordered = torch.empty_like(parameter)
    if gradient.stride() != ordered.stride():
        parameter.grad = gradient = ordered.copy_(gradient)
    return gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True)).view(-1)


def _fill_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Split the trained parameters into buckets, last parameter first, in the order of backward."""
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
