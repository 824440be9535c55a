"""One tensor that is trained sparsely: its active positions, their deltas, their state, and the pretrained values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slivertune.core.ledger import claim
from slivertune.core.parameters import check_form
from slivertune.deltas.delta import SparseDelta, read_flat, write_flat
from slivertune.sft.growth import Estimate, GrowthEstimator
from slivertune.sft.moments import Moments, regrown
from slivertune.sft.packing import Positions, rounded_at_random, rounding_generator
from slivertune.sft.selection import true_positions
from slivertune.sft.targets import Target


def bits_differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Element by element, for two tensors of one floating-point dtype of 16 or 32 bits."""
    bits = torch.int32 if left.dtype == torch.float32 else torch.int16
    return left.view(bits) != right.view(bits)


class PretrainedValues:
    """Reads and writes entries of a tensor that lies whole in its module.

    `slivertune.parallel` has others for tensors in shards, whose methods are collectives.

    Args:
        target: The tensor; its module may be given another one at any time.
    """

    is_whole = True
    """Whether every rank holds the tensor."""

    def __init__(self, target: Target) -> None:
        self._target = target

    @property
    def device(self) -> torch.device:
        """Where the tensor's gradients arrive, and so what is kept for it."""
        return self._target.parameter.device

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """Copy entries, in the tensor's dtype.

        Args:
            indices: int32, sorted flat positions; the same on every rank.
        """
        return read_flat(self._target.parameter, indices)

    def differing(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Which entries have other bits than these values, of those that this rank holds. A local operation.

        Args:
            indices: int32, sorted flat positions, shape (n,).
            values: In the tensor's dtype, shape (n,).

        Returns:
            bool, shape (n,).
        """
        return bits_differ(read_flat(self._target.parameter, indices), values)

    def write(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Set entries."""
        write_flat(self._target.parameter, indices, values)

    def whole(self) -> torch.Tensor:
        """The whole tensor, on every rank."""
        return self._target.parameter.detach()


class SparseWeight:
    """A tensor W = W0 + scatter(eta, phi) (SFT, equations 5 and 6).

    Bytes for each active weight in bf16: index 4, delta 4, pretrained value 2 if W holds the sum, and the moments.

    Args:
        target: The tensor.
        indices: Sorted int32 positions, shape (n,).
        moments: State of the update rule.
        merged: Whether W itself holds the sum (optimizer form) or stays W0 (layer form).
        packed: Whether positions and deltas take half the bytes.
        seed: Of the packed deltas' rounding.
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
            # Gradients of many micro-batches add up in fp32 whatever the deltas are kept in.
            self.phi.grad_dtype = torch.float32
        self.moments = moments
        self._dtype = target.parameter.dtype
        self.estimators: dict[int, GrowthEstimator] = {}
        """Open estimation phases by the update count at which they end."""
        self.kept_base = self.pretrained.read(self.indices) if merged else None
        """`base_values` where a copy is kept: if the weight holds the sum, or lies in shards; else None."""
        self.claim()

    @property
    def name(self) -> str:
        """The tensor's name in the model."""
        return self.target.name

    @property
    def indices(self) -> torch.Tensor:
        """Positions of the active weights: int32, shape (n,), sorted."""
        return self._positions.get()

    @property
    def num_active(self) -> int:
        """Trained weights."""
        return self.phi.numel()

    @property
    def device(self) -> torch.device:
        """Where the state lies."""
        return self._positions.tensors[0].device

    def base_values(self) -> torch.Tensor | None:
        """Pretrained values of the active weights, shape (n,), in the weight's dtype; None for a 4-bit weight.

        Where somebody else has set entries since, as the model's `load_state_dict` does, those are the pretrained ones.
        """
        if self.kept_base is None:
            return None if self.target.is_4bit else self.pretrained.read(self.indices)
        return self.kept_base if self.num_foreign() == 0 else torch.where(*self._foreign(), self.kept_base)

    def num_foreign(self) -> int:
        """Active entries of a merged weight that are not what was written last: somebody else has set them."""
        return int(self._foreign()[0].sum()) if self.merged and self.kept_base is not None else 0

    def _foreign(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each active entry whether somebody else has set it, and its present value."""
        assert self.kept_base is not None
        self.check_tensor()
        self.follow(self.pretrained.device)
        present = self.pretrained.read(self.indices)
        return bits_differ(present, self._sums(self.kept_base)), present

    def is_changed_in_shards(self) -> torch.Tensor | None:
        """Whether somebody else has set active entries of this rank's share since the weight was shared out.

        A bool without dimensions; nothing waits for the device. None for a weight that every rank holds.
        """
        if self.pretrained.is_whole or self.kept_base is None:
            return None
        return self.pretrained.differing(self.indices, self.kept_base).any()

    def adopt(self) -> None:
        """Take active entries that somebody else has set for pretrained ones, from where training goes on.

        Their deltas begin at zero again; moments and ages stay, as a plain optimizer's do. Nothing waits for the
        device.
        """
        if self.merged and self.kept_base is not None:
            is_foreign, present = self._foreign()
            self.kept_base.copy_(torch.where(is_foreign, present, self.kept_base))
            self.phi.data.masked_fill_(is_foreign, 0)

    def check_tensor(self) -> None:
        """Check that the weight is still of the dtype and the shape that it was built over, and has data.

        Raises:
            RuntimeError: If it is not, as after `model.to(dtype)`, `model.half()` or `resize_token_embeddings`.
        """
        # ZeRO-3 gathers a parameter that is asked for in a forward.
        if not self.pretrained.is_whole or self.target.is_4bit:
            return
        self._check_data()
        check_form("SFT", self.name, self.target.parameter, self._dtype, self.target.shape)

    def _check_data(self) -> None:
        if self.pretrained.is_whole and self.target.parameter.is_meta:
            raise RuntimeError(
                f"{self.name} was moved to the meta device after SFT was built, as accelerate's cpu_offload and "
                "disk_offload move weights; SFT trains weights that are in memory"
            )

    def place(self, merged: bool, pretrained: PretrainedValues) -> None:
        """Follow a model whose weights went elsewhere; they hold the pretrained values, and get the deltas if merged.

        Args:
            merged: Whether the weight itself is to hold the sum.
            pretrained: Reads and writes pretrained values.
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
        """A copy of positions and deltas."""
        return SparseDelta(self.indices.clone(), self.phi.detach().float().clone(), self.target.shape)

    def claim(self) -> None:
        """Tell the ledger what is state; a ledger that was entered later counts phi as the model's."""
        for tensor in (self.phi, *self._positions.tensors, self.kept_base, *self.moments.tensors().values()):
            if tensor is not None:
                claim(tensor, "state")
        for estimator in self.estimators.values():
            estimator.claim()

    def take(self, gradient: torch.Tensor) -> None:
        """Add the active entries of a dense gradient to phi's, in fp32."""
        self.follow(gradient.device)
        values = gradient.reshape(-1).index_select(0, self.indices).float()
        if self.phi.grad is None:
            self.phi.grad = values
            claim(values, "gradients")
        else:
            self.phi.grad += values

    def follow(self, device: torch.device) -> None:
        """Move the state to where the weight is now; the model may be moved after the optimizer was built."""
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
        """Apply the update rule to the deltas from phi's gradient, and the deltas to the weight.

        Args:
            options: Those of the param group.
            updates: Finished updates of the run, from which packed values draw their rounding.
        """
        self.adopt()
        if self.phi.grad is None:
            return
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
            self.pretrained.write(self.indices, self._sums(self.kept_base))

    def _sums(self, base: torch.Tensor) -> torch.Tensor:
        """W0 + delta at the active entries, added in fp32 and rounded once."""
        return (base.float() + self.phi.data).to(base.dtype)

    def merge(self) -> None:
        """Give a weight that stayed W0 its deltas for good."""
        if self.merged:
            return
        self._check_data()
        base = self.base_values()
        if base is not None:
            self.pretrained.write(self.indices, self._sums(base))

    def write_base(self) -> None:
        """Set the active entries of a merged weight to their pretrained bits."""
        if self.merged and self.kept_base is not None:
            self.pretrained.write(self.indices, self.kept_base)

    def replace(
        self, dropped: torch.Tensor, grown: torch.Tensor, estimate: Estimate | None, options: Mapping[str, Any]
    ) -> None:
        """Drop entries, which restores their pretrained bits, and grow others with a delta of zero.

        Args:
            dropped: bool, shape (n,).
            grown: int32, sorted, shape (m,): positions that are not active.
            estimate: AG's moments of the grown positions.
            options: Those of the param group.
        """
        former, stay = self.indices, true_positions(~dropped)
        indices, order = torch.cat([former.index_select(0, stay), grown]).sort()
        if self.kept_base is not None:
            base = self.pretrained.read(grown)
            if self.merged:
                # Entries that stay hold their sums from this step's update.
                gone = true_positions(dropped)
                self.pretrained.write(former.index_select(0, gone), self.kept_base.index_select(0, gone))
                # Adding a delta of zero, as every update does, turns -0.0 into 0.0.
                self.pretrained.write(grown, (base.float() + 0.0).to(base.dtype))
            self.kept_base = regrown(self.kept_base, stay, base, order)
        self._positions.set(indices)
        self.phi.grad = None
        self.phi.data = regrown(self.phi.data, stay, self.phi.data.new_zeros(grown.numel()), order)
        self.moments.replace(stay, estimate, order, options)
        self.claim()

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues the run, in plain containers; tensors are the living ones where possible."""
        base, delta = self.base_values(), self.phi.data
        if self.num_foreign():
            delta = delta.masked_fill(self._foreign()[0], 0)
        states = ((end, estimator.state_dict()) for end, estimator in self.estimators.items())
        estimates = {end: state for end, state in states if state is not None}
        return {
            "indices": self.indices,
            "delta": delta,
            **({} if base is None else {"base": base}),
            **self.moments.tensors(),
            **({"estimates": estimates} if estimates else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checked state; tensors are copied, the weight gets its bits."""
        device = self.pretrained.device
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
        """Continue the estimation phases that are open; tensors are copied."""
        for end, estimator in self.estimators.items():
            if end in state.get("estimates", {}):
                estimator.load_state_dict(state["estimates"][end], self.pretrained.device)
