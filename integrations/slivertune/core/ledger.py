"""Count live bytes by kind and by memory tier: a census of live storages, not a self-report.

A `Ledger` watches every tensor that an operator returns (a dispatch mode) and every death (a weak reference to the
storage), so it counts the bytes that are really alive. Owners may *claim* a storage (`claim`): the model's weights, a
parameter's gradient, an optimizer's state. Unclaimed bytes on the device count as `residual`: activations, temporaries,
leaks. Only bytes that an owner claimed for another tier (pinned host memory, a file) count there. On a machine without
an accelerator, the CPU itself is "the device".
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from slivertune.core.module_hook import StandIn
from slivertune.core.torch_internals import (
    ASKS_FOR_DEVICE,
    FakeTensor,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    storage_key,
)
from slivertune.core.weak_members import WeakMembers, add_member, is_member, living

Kind = Literal["parameters", "gradients", "state", "activations", "residual"]
MemoryTier = Literal["device", "host", "disk"]

_DEVICE_KINDS: tuple[Kind, ...] = ("parameters", "gradients", "state", "residual")


@dataclass(frozen=True, kw_only=True, slots=True)
class Census:
    """Live bytes at one moment."""

    parameters: int = 0
    """Bytes of the model's parameters and buffers on the device."""
    gradients: int = 0
    """Bytes of `.grad` tensors on the device."""
    state: int = 0
    """Bytes of optimizer state and fp32 master weights on the device."""
    residual: int = 0
    """Bytes on the device that no one claimed (activations, temporaries, leaks)."""
    host: int = 0
    """Bytes that an owner claimed for host memory, except activations."""
    host_activations: int = 0
    """Bytes of host memory for offloaded activations."""
    disk: int = 0
    """Bytes that an owner claimed for memory-mapped files, or keeps in files (`FileBytes`)."""

    @property
    def device(self) -> int:
        """All bytes on the device."""
        return self.parameters + self.gradients + self.state + self.residual

    def line(self) -> str:
        """Format the census as one line for people, in decimal megabytes."""
        parts = [
            f"weights {self.parameters / 1e6:.1f} MB",
            f"gradients {self.gradients / 1e6:.1f} MB",
            f"state on the device {self.state / 1e6:.1f} MB",
            f"state on the host {self.host / 1e6:.1f} MB",
        ]
        if self.host_activations:
            parts.append(f"activations on the host {self.host_activations / 1e6:.1f} MB")
        if self.disk:
            parts.append(f"state on disk {self.disk / 1e6:.1f} MB")
        return ", ".join(parts)


class _Death(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage. Its callback is `deque.append`, in C: a Python callback would lose a Ctrl-C."""

    __slots__ = ("key",)
    key: int


def _await_death(storage: torch.UntypedStorage, dead: deque[weakref.ref[torch.UntypedStorage]]) -> _Death:
    death = _Death(storage, dead.append)
    death.key = storage_key(storage)
    return death


# Claims by storage address. Dead storages are removed before each look-up, so an address is never stale.
_claims: dict[int, tuple[str, _Death]] = {}
_dead_claims: deque[Any] = deque()
_watching: list[Ledger] = []
_birth_labels: list[str] = []


def claim(tensor: torch.Tensor, kind: Kind, tier: MemoryTier = "device") -> None:
    """Label the storage under `tensor` with its kind and its memory tier. A later claim replaces an earlier one.

    Args:
        tensor: Any tensor. The claim covers its whole storage.
        kind: Kind of the bytes.
        tier: Memory tier in which they count. `device` is the computing device.
    """
    label = _label(kind, tier)
    for storage in _storages(tensor):
        known = _claim_of(storage)
        _claims[storage_key(storage)] = (label, _await_death(storage, _dead_claims) if known is None else known[1])
        for ledger in _watching:
            ledger._relabel(storage, label)


def _label(kind: Kind, tier: MemoryTier) -> str:
    if kind == "activations":
        return "host_activations" if tier == "host" else "residual"
    return kind if tier == "device" else tier


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages under a tensor. A wrapper's own (a DTensor's) has the whole weight's size, but no memory."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or not is_traceable_wrapper_subclass(tensor):
        yield tensor.untyped_storage()
        return
    names, _ = tensor.__tensor_flatten__()
    for inner in (getattr(tensor, name) for name in names):
        if isinstance(inner, torch.Tensor):  # else the mesh of a DTensor
            yield from _storages(inner)


def _claim_of(storage: torch.UntypedStorage) -> tuple[str, _Death] | None:
    while _dead_claims:
        _claims.pop(_dead_claims.popleft().key, None)
    return _claims.get(storage_key(storage))


def claimed_as(tensor: torch.Tensor) -> str | None:
    """Return a claimed tensor's field of `Census`: its kind on the device, or its tier. None if no one claimed it."""
    found = _claim_of(tensor.untyped_storage())
    return None if found is None else found[0]


@contextmanager
def claimed_at_birth(kind: Kind, tier: MemoryTier = "device") -> Iterator[None]:
    """Claim every storage that is allocated inside, from its first moment on, so that no peak sees it unclaimed."""
    _birth_labels.append(_label(kind, tier))
    try:
        yield
    finally:
        _birth_labels.pop()


class FileBytes:
    """Bytes that an owner keeps in files. They count as long as this object lives."""

    def __init__(self) -> None:
        self._num_bytes = 0
        add_member(_files, self)

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        return self._num_bytes

    @num_bytes.setter
    def num_bytes(self, value: int) -> None:
        self._num_bytes = value
        for ledger in _watching:
            ledger._see_files()


_files: WeakMembers[FileBytes] = {}


def _bytes_in_files() -> int:
    return sum(each.num_bytes for each in living(_files))


class StateCount:
    """Counts the state that owners have claimed since it was made, in this process. It needs no `Ledger`.

    Earlier claims are left out, such as those of an optimizer of an earlier run that is still alive.
    """

    def __init__(self) -> None:
        # Keep these alive, so that no later claim can get the identity of one of them.
        self._earlier = {id(death): death for _, death in _claims.values()}
        self._earlier_files: WeakMembers[FileBytes] = {}
        for each in living(_files):
            add_member(self._earlier_files, each)

    def num_bytes(self) -> dict[MemoryTier, int]:
        """Return the bytes of live storages, by tier, without reading a tensor.

        Offloaded data in host memory or in files counts whole, offloaded gradients included.
        """
        num_bytes: dict[MemoryTier, int] = {"device": 0, "host": 0, "disk": 0}
        tiers: dict[str, MemoryTier] = {"state": "device", "host": "host", "disk": "disk"}
        for label, death in list(_claims.values()):
            storage = death()
            if storage is not None and label in tiers and id(death) not in self._earlier:
                num_bytes[tiers[label]] += storage.nbytes()
        num_bytes["disk"] += sum(each.num_bytes for each in living(_files) if not is_member(self._earlier_files, each))
        return num_bytes


class Ledger:
    """Count live bytes while it is entered, as a context manager.

    It costs a few microseconds of Python per operator. It does not see allocations inside one operator that die before
    it returns. Nor does it see that an engine takes the memory from under a live tensor (FSDP2 does so with gathered
    weights; `track` looks again). On CUDA, `torch.cuda.max_memory_allocated` stays the authority on the peak.

    Args:
        model: Model whose parameters, buffers and gradients are claimed as such, except parameters that an owner
            claimed as state. Without a model, everything that no other owner claims is residual.

    Example:
        >>> with Ledger(model) as ledger:
        ...     model(**batch).loss.backward()
        >>> ledger.peak.gradients
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._alive: dict[int, tuple[int, str, _Death]] = {}
        self._dead: deque[Any] = deque()
        self._totals: dict[str, int] = dict.fromkeys((*_DEVICE_KINDS, "host", "host_activations", "disk"), 0)
        self._device_total = 0
        self._peak_total = -1
        self._peak: dict[str, int] = dict(self._totals)
        self._highest: dict[str, int] = dict(self._totals)
        self._device_type: str | None = None
        self._mode = Watch(self)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        _watching.append(self)
        if self._model is not None:
            self._adopt_model(self._model)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _watching.remove(self)
        while self._hooks:
            self._hooks.pop().remove()

    def current(self) -> Census:
        """Return the bytes that are alive now."""
        if self._model is not None:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    claim(parameter.grad, "gradients")
        self._bury()
        return Census(**self._with_files())

    @property
    def peak(self) -> Census:
        """Live bytes at the moment of the largest total on the device since `reset_peak`."""
        return Census(**self._peak)

    @property
    def highest(self) -> Census:
        """Largest value of each kind since `reset_peak`. The moments differ, so these do not add up to a peak."""
        return Census(**self._highest)

    def reset_peak(self) -> None:
        """Start new maxima from the bytes that are alive now."""
        self._bury()
        self._peak_total = -1
        self._highest = self._with_files()
        self._record_peak()

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors made before the ledger was entered, or count tensors again whose storage was resized."""
        for tensor in tensors:
            self._see(tensor)

    def _adopt_model(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            self._device_type = self._device_type or parameter.device.type
            claims = [_claim_of(storage) for storage in _storages(parameter)]
            # SFT's deltas are optimizer state, but also parameters of the model, so that training loops clip them.
            # Offloaded parameters belong to their owner, too.
            if any(claimed is not None and claimed[0] in ("host", "disk") for claimed in claims):
                self.track((parameter,))
            elif not any(claimed is not None and claimed[0] == "state" for claimed in claims):
                claim(parameter, "parameters")
                # ZeRO-3 keeps a rank's share beside the parameter, which is empty unless it is gathered.
                share = getattr(parameter, "ds_tensor", None)
                if share is not None and share.device == parameter.device:
                    claim(share, "parameters")
            if parameter.grad is not None:
                claim(parameter.grad, "gradients")
            self._watch_gradient(parameter)
        for buffer in model.buffers():
            claim(buffer, "parameters")
        for module in model.modules():
            for stand_in in vars(module).values():
                if isinstance(stand_in, StandIn):
                    self.track(stand_in.kept_tensors())

    def _watch_gradient(self, parameter: nn.Parameter) -> None:
        if not parameter.is_floating_point():
            return
        # The hook stays through later freezing and unfreezing, but needs a parameter that requires a gradient.
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(_claim_gradient))
        parameter.requires_grad_(requires_grad)

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.is_sparse or tensor.device.type == "meta":
            return
        self._bury()
        for storage in _storages(tensor):
            self._see_storage(storage, tensor.device.type)

    def _see_storage(self, storage: torch.UntypedStorage, device_type: str) -> None:
        known = self._alive.get(storage_key(storage))
        num_bytes = storage.nbytes()
        if known is not None and known[0] == num_bytes:
            return
        claimed = _claim_of(storage)
        label = known[1] if known is not None else claimed[0] if claimed is not None else None
        if label is None and _birth_labels:
            label = _birth_labels[-1]
        if label is None:
            if self._device_type is not None and device_type != self._device_type:
                return
            label = "residual"
        self._count(storage, num_bytes, label)

    def _relabel(self, storage: torch.UntypedStorage, label: str) -> None:
        self._bury()
        known = self._alive.get(storage_key(storage))
        if known is None or known[1] != label:
            self._count(storage, storage.nbytes(), label)

    def _count(self, storage: torch.UntypedStorage, num_bytes: int, label: str) -> None:
        known = self._alive.get(storage_key(storage))
        if known is not None:
            self._add(-known[0], known[1])
        death = _await_death(storage, self._dead) if known is None else known[2]
        self._alive[storage_key(storage)] = (num_bytes, label, death)
        self._add(num_bytes, label)
        if self._device_total > self._peak_total:
            self._record_peak()

    def _bury(self) -> None:
        while self._dead:
            num_bytes, label, _ = self._alive.pop(self._dead.popleft().key)
            self._add(-num_bytes, label)

    def _add(self, num_bytes: int, label: str) -> None:
        self._totals[label] += num_bytes
        if self._totals[label] > self._highest[label]:
            self._highest[label] = self._totals[label]
        if label in _DEVICE_KINDS:
            self._device_total += num_bytes

    def _record_peak(self) -> None:
        self._peak_total = self._device_total
        self._peak = self._with_files()

    def _with_files(self) -> dict[str, int]:
        return {**self._totals, "disk": self._totals["disk"] + _bytes_in_files()}

    def _see_files(self) -> None:
        self._highest["disk"] = max(self._highest["disk"], self._with_files()["disk"])


class Watch(TorchDispatchMode):
    """Mode that shows a ledger every tensor that an operator returns."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = ledger._see

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile inside of a ledger. It refuses to under modes that need to see each operator."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ASKS_FOR_DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        self.show(out)
        return out

    def show(self, out: Any) -> None:
        """Count the tensors that an operator has returned.

        Args:
            out: Tensors, in any nest of tuples and lists.
        """
        if isinstance(out, torch.Tensor):
            self._see(out)
        elif isinstance(out, (tuple, list)):
            for each in out:
                self.show(each)


def _claim_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        claim(parameter.grad, "gradients")
