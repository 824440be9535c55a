"""One tensor that is trained sparsely: active positions, their deltas, optimizer state and pretrained values."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from slivertune.core.ledger import claim
from slivertune.core.parameters import check_form
from slivertune.deltas.delta import SparseDelta, read_flat, rounded_sum, write_flat
from slivertune.deltas.hashes import hash_tensor
from slivertune.parked.park import compute_device_of
from slivertune.parked.quantized_weight import held_by
from slivertune.sft.growth import Estimate, GrowthEstimator
from slivertune.sft.largest import NONE
from slivertune.sft.moments import Moments, regrown
from slivertune.sft.packing import Positions, rounded_at_random, rounding_generator
from slivertune.sft.targets import Target

_NOWHERE = torch.iinfo(torch.int32).max
"""Position after all entries of a tensor, of which SFT indexes fewer."""


def bits_differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compare the bits of two tensors of one floating-point dtype of 16 or 32 bits, element by element."""
    bits = torch.int32 if left.dtype == torch.float32 else torch.int16
    return left.view(bits) != right.view(bits)


class PretrainedValues:
    """Reads and writes entries of a tensor that its module holds whole.

    `slivertune.parallel` has other classes for sharded tensors. Their methods are collectives.

    Args:
        target: Tensor to read and write; its module may exchange it at any time.
    """

    is_whole = True
    """Whether every rank holds the tensor."""

    def __init__(self, target: Target) -> None:
        self._target = target

    @property
    def device(self) -> torch.device:
        """Device of the tensor's gradients, and so of its state."""
        return compute_device_of(self._target.parameter)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """Copy entries, in the tensor's dtype.

        Args:
            indices: Sorted flat positions, int32; the same on every rank.
        """
        exact = self.whole()
        return read_flat(exact, indices.to(exact.device)).to(indices.device)

    def differing(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Mark the entries that this rank holds whose bits differ from given values, as a local operation.

        Args:
            indices: Sorted flat positions, int32, shape (n,).
            values: Values in the tensor's dtype, shape (n,).

        Returns:
            Mask, bool, shape (n,).
        """
        return bits_differ(self.read(indices), values)

    def write(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Set entries."""
        held, exact = held_by(self._target.module), self.whole()
        if held is not None and held.is_quantized:
            exact = exact.clone()
        write_flat(exact, indices.to(exact.device), values.to(exact.device))
        if held is not None and held.is_quantized:
            held.write(exact)

    def whole(self) -> torch.Tensor:
        """Return the whole tensor, on every rank. If it is parked, it is in host memory."""
        held = held_by(self._target.module)
        return self._target.parameter.detach() if held is None else held.exact()


class SparseWeight:
    """A tensor W = W0 + scatter(eta, phi) (SFT, equations 5 and 6).

    Bytes per active weight in bf16: 4 for the index, 4 for the delta, 2 for the pretrained value if W holds the sum,
    and the moments.

    Args:
        target: The tensor.
        indices: Sorted int32 positions, shape (n,).
        moments: State of the update rule.
        merged: Whether W itself holds the sum (optimizer form) or stays W0 (layer form).
        packed: Whether positions and deltas take half the bytes.
        seed: Seed of the packed deltas' rounding.
    """

    def __init__(
        self,
        target: Target,
        indices: torch.Tensor,
        moments: Moments,
        *,
        merged: bool,
        packed: bool = False,
        seed: int = 0,
    ) -> None:
        self.target = target
        self.merged = merged
        self.packed = packed
        self.pretrained = PretrainedValues(target)
        self._seed = seed
        indices = indices.to(self.pretrained.device)
        self._positions = Positions(indices, target.num_elements, packed=packed)
        dtype = torch.bfloat16 if packed else torch.float32
        self.phi = nn.Parameter(torch.zeros(indices.shape, dtype=dtype, device=indices.device))
        if packed:
            # Gradients of many micro-batches add up in fp32, whatever the dtype of the deltas.
            self.phi.grad_dtype = torch.float32
        self.moments = moments
        self._dtype = target.parameter.dtype
        self.version = 0
        """Number of changes of the positions and the deltas."""
        self.estimators: dict[int, GrowthEstimator] = {}
        """Estimators of the open estimation phases, by the update count at which each phase ends."""
        self.kept_base = self.pretrained.read(self.indices) if merged else None
        """Copy that `base_values` starts from, if the weight holds the sum or is sharded, else None."""
        self.claim()

    @property
    def name(self) -> str:
        """Name of the tensor in the model."""
        return self.target.name

    @property
    def indices(self) -> torch.Tensor:
        """Positions of the active weights: int32, shape (n,), sorted."""
        return self._positions.get()

    def cuts(self, edges: tuple[int, ...]) -> list[int]:
        """Count the active positions below each edge."""
        return self._positions.cuts(edges)

    @property
    def num_active(self) -> int:
        """Number of trained weights."""
        return self.phi.numel()

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self._positions.tensors[0].device

    def base_values(self) -> torch.Tensor | None:
        """Return the active weights' pretrained values, shape (n,), in the weight's dtype, or None for a 4-bit weight.

        Entries that other code has set since, such as the model's `load_state_dict`, count as pretrained values.
        """
        if self.kept_base is None:
            return None if self.target.is_4bit else self.pretrained.read(self.indices)
        return self.kept_base if self.num_foreign() == 0 else torch.where(*self._foreign(), self.kept_base)

    @cached_property
    def codes_hash(self) -> str:
        """Hash of a 4-bit weight's codes and scales, which never change."""
        parameter: Any = self.target.parameter
        state = parameter.quant_state
        return " ".join([str(state.quant_type), hash_tensor(parameter.data), hash_tensor(state.absmax)])

    def num_foreign(self) -> int:
        """Count the active entries of a merged weight that other code has set since SFT wrote them last."""
        return int(self._foreign()[0].sum()) if self.merged and self.kept_base is not None else 0

    def _foreign(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each active entry whether other code has set it, and its present value."""
        assert self.kept_base is not None
        self.check_tensor()
        self.follow(self.pretrained.device)
        present = self.pretrained.read(self.indices)
        return bits_differ(present, rounded_sum(self.kept_base, self.phi.data)), present

    def is_changed_in_shards(self) -> torch.Tensor | None:
        """Return whether other code has set active entries of this rank's shard since the weight was sharded.

        The result is a bool scalar on the device, without synchronisation; None for a weight that every rank holds.
        """
        if self.pretrained.is_whole or self.kept_base is None:
            return None
        return self.pretrained.differing(self.indices, self.kept_base).any()

    def adopt(self) -> None:
        """Turn active entries that other code has set into pretrained values, from which training continues.

        Their deltas restart at zero. Moments and ages stay, as in a plain optimizer. The device is not synchronised.
        """
        if self.merged and self.kept_base is not None:
            is_foreign, present = self._foreign()
            self.kept_base.copy_(torch.where(is_foreign, present, self.kept_base))
            self.phi.data.masked_fill_(is_foreign, 0)

    def check_tensor(self) -> None:
        """Check that the weight still has the dtype and the shape that it was built over, and has data.

        Raises:
            RuntimeError: If it has not, as after `model.to(dtype)`, `model.half()` or `resize_token_embeddings`.
        """
        # Under ZeRO-3, reading a parameter in a forward gathers it.
        if not self.pretrained.is_whole or self.target.is_4bit:
            return
        self._check_data()
        check_form("SFT", self.name, self.target.parameter, self._dtype, self.target.shape)

    def _check_data(self) -> None:
        if self.pretrained.is_whole and self.target.parameter.is_meta:
            raise RuntimeError(
                f"{self.name} was moved to the meta device after SFT was built, as accelerate's cpu_offload and "
                "disk_offload do. Keep the weights in memory while SFT trains them"
            )

    def place(self, merged: bool, pretrained: PretrainedValues) -> None:
        """Rebind to moved weights, which hold the pretrained values, and add the deltas to them if merged.

        Args:
            merged: Whether the weight itself is to hold the sum.
            pretrained: Reader and writer of the pretrained values.
        """
        self.merged, self.pretrained = merged, pretrained
        self._dtype = self.target.parameter.dtype
        self.follow(pretrained.device)
        self._keep_base()
        self.write()
        self.claim()

    def _keep_base(self) -> None:
        is_kept = self.merged or not self.pretrained.is_whole
        self.kept_base = self.pretrained.read(self.indices) if is_kept else None

    def delta(self) -> SparseDelta:
        """Copy the positions and the deltas."""
        return SparseDelta(self.indices.clone(), self.phi.detach().float().clone(), self.target.shape)

    def claim(self) -> None:
        """Register the state with the memory ledger. A ledger entered later counts phi as the model's."""
        for tensor in (self.phi, *self._positions.tensors, self.kept_base, *self.moments.tensors().values()):
            if tensor is not None:
                claim(tensor, "state")
        for estimator in self.estimators.values():
            estimator.claim()

    def take(self, gradient: torch.Tensor) -> None:
        """Add the active entries of a dense gradient to phi's gradient, in fp32."""
        self.follow(gradient.device)
        values = gradient.reshape(-1).index_select(0, self.indices).float()
        if self.phi.grad is None:
            self.phi.grad = values
            claim(values, "gradients")
        else:
            self.phi.grad += values

    def follow(self, device: torch.device) -> None:
        """Move the state to the weight's device, since the model may be moved after the optimizer was built."""
        if self.device == device and self.phi.device == device:
            return
        self.phi.data = self.phi.data.to(device)
        self._positions.set(self.indices.to(device))
        self.kept_base = None if self.kept_base is None else self.kept_base.to(device)
        self.moments.set_tensors({name: tensor.to(device) for name, tensor in self.moments.tensors().items()})
        for estimator in self.estimators.values():
            estimator.to(device)
        self.claim()

    def update(self, options: Mapping[str, Any], updates: int) -> None:
        """Apply the update rule to the deltas, with phi's gradient, and write the deltas into the weight.

        Args:
            options: Options of the param group.
            updates: Finished updates of the run, which seed the rounding of packed values.
        """
        self.adopt()
        if self.phi.grad is None:
            return
        self.version += 1
        if self.packed:
            generator = rounding_generator(self._seed, self.name, updates, self.phi.device)
            delta = self.phi.data.float()
            self.moments.update(delta, self.phi.grad, self.indices, options, generator)
            self.phi.data.copy_(rounded_at_random(delta, generator))
        else:
            self.moments.update(self.phi.data, self.phi.grad, self.indices, options)
        self.write()

    def write(self) -> None:
        """Set the active entries of a merged weight to W0 + delta, added in fp32 and rounded once."""
        if self.merged and self.kept_base is not None:
            self.pretrained.write(self.indices, rounded_sum(self.kept_base, self.phi.data))

    def merge(self) -> None:
        """Add the deltas for good to a weight that still holds W0."""
        if self.merged:
            return
        self._check_data()
        base = self.base_values()
        if base is not None:
            self.pretrained.write(self.indices, rounded_sum(base, self.phi.data))

    def write_base(self) -> None:
        """Restore the pretrained bits of a merged weight's active entries."""
        if self.merged and self.kept_base is not None:
            self.pretrained.write(self.indices, self.kept_base)

    def replace(
        self,
        dropped: torch.Tensor,
        grown: torch.Tensor,
        estimate: Estimate | None,
        options: Mapping[str, Any],
        num_active: int | None = None,
    ) -> None:
        """Drop entries, restore their pretrained bits, and grow others with a delta of zero.

        Args:
            dropped: Mask of the entries to drop, bool, shape (n,).
            grown: Positions to grow, int32, shape (m,), with `NONE` in place of those that are missing; none is active.
            estimate: AG's estimate at the grown positions.
            options: Options of the param group.
            num_active: Number of entries afterwards. By default n: then as many must be grown as are dropped.
        """
        num_active = self.num_active if num_active is None else num_active
        self.version += 1
        self.write_base()
        former = self.indices.masked_fill(dropped, _NOWHERE)
        indices, order = torch.cat([former, grown.masked_fill(grown == NONE, _NOWHERE)]).sort()
        order = order[:num_active]
        self._positions.set(indices[:num_active].clone())
        if self.kept_base is not None:
            self.kept_base = self.pretrained.read(self.indices)
        self.phi.grad = None
        self.phi.data = regrown(self.phi.data, self.phi.data.new_zeros(grown.numel()), order)
        self.moments.replace(grown.numel(), estimate, order, options)
        self.write()
        self.claim()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that continues the run, in plain containers, with live tensors where possible."""
        base, delta = self.base_values(), self.phi.data
        if self.num_foreign():
            delta = delta.masked_fill(self._foreign()[0], 0)
        states = ((end, estimator.state_dict()) for end, estimator in self.estimators.items())
        estimates = {end: state for end, state in states if state is not None}
        return {
            "indices": self.indices,
            "delta": delta,
            **({} if base is None else {"base": base}),
            **({"codes": self.codes_hash} if self.target.is_4bit else {}),
            **self.moments.tensors(),
            **({"estimates": estimates} if estimates else {}),
        }

    def forget(self) -> None:
        """Have no active entries, so that the weight's present bits count as pretrained values in what is loaded."""
        self._positions.set(torch.zeros(0, dtype=torch.int32, device=self.device))
        self.phi.grad = None
        self.phi.data = self.phi.data[:0].clone()
        self.kept_base = None if self.kept_base is None else self.kept_base[:0].clone()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a copy of a checked state, and write its bits into the weight."""
        device = self.pretrained.device
        self.version += 1
        self.adopt()
        self.write_base()
        self._positions.set(state["indices"].to(device, copy=True))
        self.phi.grad = None
        self.phi.data = state["delta"].to(device, copy=True)
        self.moments.set_tensors({name: state[name].to(device, copy=True) for name in self.moments.tensors()})
        if self.kept_base is not None:
            self.kept_base = state["base"].to(device, copy=True)
        if self.merged:
            self.write()
        elif "base" in state and not self.target.is_4bit:
            self.pretrained.write(self.indices, state["base"].to(device))
        self.estimators = {}
        self.claim()

    def load_estimates(self, state: Mapping[str, Any]) -> None:
        """Load copies of the saved states of the open estimation phases."""
        for end, estimator in self.estimators.items():
            if end in state.get("estimates", {}):
                estimator.load_state_dict(state["estimates"][end], self.pretrained.device)
