"""Deltas on a loaded model: added in place, and removed exactly, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from slivertune.deltas.additions import Addition, Destination, Source, TargetInfo, add_rounded, add_up, read_sources
from slivertune.deltas.delta import Overlap, read_flat, total_overlap, write_flat
from slivertune.deltas.delta_file import memory_of
from slivertune.deltas.hashes import hash_tensor


def apply(
    model: nn.Module,
    deltas: Source | Sequence[Source],
    *,
    check_base: bool = True,
    allow_quantized_base: bool = False,
) -> AppliedDeltas:
    """Add deltas to a model's weights in place. `remove()` restores the pretrained bits.

    Several deltas are summed in fp32, added in fp32 and rounded once. Costs an int32 position and the pretrained bits
    per touched weight, on its device. Either all tensors are changed or none.

    Args:
        model: The model, on any device, in float32, bfloat16 or float16.
        deltas: One or several folders of `save_pretrained`, results of `load`, or deltas by name.
        check_base: Whether to compare the bits of the weights with those that the deltas were trained on, which reads
            the weights once. Deltas in memory have no base to compare with.
        allow_quantized_base: Whether deltas that were trained over a 4-bit model may be added to the weights from which
            it was quantised. Results are then close, not equal.

    Returns:
        A handle, also a context manager, which removes the deltas and reports their overlap.

    Raises:
        FileNotFoundError: If a folder holds no deltas.
        ValueError: If a file is damaged or hostile, the model is not the base, or a weight is 4-bit or sharded.

    Example:
        >>> with apply(model, ["deltas/law", "deltas/german"]) as handle:
        ...     print(handle.overlap)
        ...     model.generate(**inputs)
    """
    target_info = TargetInfo(
        name="the model",
        unknown="",
        quantized=(
            "Quantised codes are never changed. Load the model in 16 bits, without quantization_config, or train on "
            "with the deltas beside the codes, SFT(..., form='layer')"
        ),
        allow_quantized_base=allow_quantized_base,
        has_copies=False,
    )
    additions = add_up(read_sources(deltas), _weights_of(model), target_info, hash_base=check_base)
    applied = AppliedDeltas(model, {addition.target.name: addition.overlap for addition in additions})
    try:
        for addition in additions:
            applied._add(addition)
    except BaseException:
        applied._restore()
        raise
    return applied


class AppliedDeltas:
    """Deltas on a model, until they are removed.

    Args:
        model: The model.
        overlap_of: Overlap of each changed tensor.
    """

    def __init__(self, model: nn.Module, overlap_of: dict[str, Overlap]) -> None:
        self._model = model
        self.overlap_of = overlap_of
        """Overlap of each changed tensor: number of touched weights, and of those that several deltas touch."""
        self._changes: list[_Change] = []

    @property
    def overlap(self) -> Overlap:
        """Overlap over all tensors."""
        return total_overlap(self.overlap_of.values())

    def remove(self) -> None:
        """Restore the pretrained bits of the touched weights. A second call does nothing.

        Raises:
            RuntimeError: If weights have changed or were replaced since; nothing is restored then.
        """
        held = {id(each) for each in self._model.parameters()}
        for change in self._changes:
            if id(change.weight) not in held:
                raise RuntimeError(
                    f"{change.name!r} is another tensor now than deltas were applied to. Remove them before the model "
                    "is sharded or loaded by assignment, or load it again"
                )
            change.check()
        self._restore()

    def __enter__(self) -> AppliedDeltas:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _add(self, addition: Addition[_Weight]) -> None:
        name, weight = addition.target.name, addition.target.parameter
        indices = addition.delta.indices.to(weight.device)
        pretrained = read_flat(weight, indices)
        changed = add_rounded(name, pretrained, addition.delta.values.to(weight.device))
        # Listed before the write, so that an interruption between the two lines is undone as well.
        self._changes.append(_Change(name, weight, indices, pretrained, hash_tensor(changed)))
        write_flat(weight, indices, changed)

    def _restore(self) -> None:
        while self._changes:
            change, device = self._changes[-1], self._changes[-1].weight.device
            write_flat(change.weight, change.indices.to(device), change.pretrained.to(device))
            self._changes.pop()


@dataclass(frozen=True, slots=True)
class _Change:
    name: str
    weight: nn.Parameter
    indices: torch.Tensor
    pretrained: torch.Tensor
    sha256: str
    """Hash of the changed entries. With it, the check of `remove` needs no copy of them."""

    def check(self) -> None:
        if self.weight.dtype != self.pretrained.dtype:
            raise RuntimeError(
                f"{self.name!r} was {self.pretrained.dtype} when deltas were applied and is {self.weight.dtype} now. "
                "Remove them before the model is cast, or load it again"
            )
        now = hash_tensor(read_flat(self.weight, self.indices.to(self.weight.device)))
        # An interrupted removal may already have restored this one.
        if now not in (self.sha256, hash_tensor(self.pretrained)):
            raise RuntimeError(
                f"{self.name!r} has changed since deltas were applied, and removing them would lose that. First remove "
                "the deltas that were applied later, or load the model again if it was trained"
            )


@dataclass(frozen=True, slots=True)
class _Weight(Destination):
    parameter: nn.Parameter

    def sha256(self) -> str:
        return hash_tensor(self.parameter)


def _weights_of(model: nn.Module) -> dict[str, _Weight]:
    weights: dict[str, _Weight] = {}
    of_memory: dict[object, _Weight] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "full_tensor"):
            raise ValueError(f"{name!r} is sharded. Apply deltas before the model is sharded (fully_shard)")
        weight = _Weight(name, parameter.dtype, tuple(parameter.shape), parameter)
        weights[name] = of_memory.setdefault(memory_of(parameter), weight)
    return weights
