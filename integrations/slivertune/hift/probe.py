"""Measures what one step of a base optimizer needs, on small dummy weights: state to keep, temporaries to survive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slivertune.hift.base import CUT_MULTIPLE, BaseOptimizer
from slivertune.hift.piece import Weight
from slivertune.ledger import Ledger, claim

_PROBE_ELEMENTS = 64 * CUT_MULTIPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNeeds:
    """What a step of one weight needs beside the weight and its gradient."""

    state_bytes: Mapping[torch.dtype, float]
    """Bytes of state tensors that have dimensions, by dtype."""
    temporary_bytes: float
    """Bytes: the largest total of what the step allocates and drops."""
    keys: frozenset[str]
    """Keys of all state."""
    scalars_on_device: frozenset[str]
    """Keys of state without dimensions that lies beside the weight rather than on the host."""


class StepMeter:
    """Measures a base optimizer; remembers what it measured.

    Args:
        base: The base optimizer.
        param_groups: Hyperparameters by param group.
    """

    def __init__(self, base: BaseOptimizer, param_groups: Sequence[dict[str, Any]]) -> None:
        self._base = base
        self._param_groups = param_groups
        self._measured: dict[tuple[Any, ...], StepNeeds] = {}

    @property
    def is_elementwise(self) -> bool:
        """Whether a large weight needs in proportion what a small one does."""
        return self._base.slicing.unit == "elements"

    def needs(self, weight: Weight, dtype: torch.dtype) -> StepNeeds:
        """The needs of a weight stepped in `dtype`, on its device."""
        parameter = weight.parameter
        num_elements = parameter.numel()
        if not self.is_elementwise or num_elements < _PROBE_ELEMENTS:
            return self._of_shape(tuple(parameter.shape), weight.param_group, dtype, parameter.device)
        sample = self._of_shape((_PROBE_ELEMENTS,), weight.param_group, dtype, parameter.device)
        scale = num_elements / _PROBE_ELEMENTS
        return replace(
            sample,
            state_bytes={dtype: num_bytes * scale for dtype, num_bytes in sample.state_bytes.items()},
            temporary_bytes=sample.temporary_bytes * scale,
        )

    def scalars_on_device(self, weight: Weight, dtype: torch.dtype) -> frozenset[str]:
        """Keys of state without dimensions that must return to the device; on a CPU there is nowhere to go."""
        return frozenset() if weight.parameter.device.type == "cpu" else self.needs(weight, dtype).scalars_on_device

    def _of_shape(
        self, shape: tuple[int, ...], param_group: int, dtype: torch.dtype, device: torch.device
    ) -> StepNeeds:
        key = (shape, param_group, dtype, device)
        if key not in self._measured:
            self._measured[key] = self._measure(*key)
        return self._measured[key]

    def _measure(self, shape: tuple[int, ...], param_group: int, dtype: torch.dtype, device: torch.device) -> StepNeeds:
        weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        weight.grad = torch.zeros_like(weight)
        hyperparameters = {key: value for key, value in self._param_groups[param_group].items() if key != "params"}
        optimizer = self._base.build([{**hyperparameters, "params": [weight]}])
        optimizer.step()  # the first step creates the state
        claim(weight, "parameters")
        claim(weight.grad, "gradients")
        state = {key: value for key, value in optimizer.state[weight].items() if isinstance(value, torch.Tensor)}
        for tensor in state.values():
            claim(tensor, "state")
        with Ledger() as ledger:
            optimizer.step()
        state_bytes: Counter[torch.dtype] = Counter()
        for tensor in state.values():
            if tensor.dim():
                state_bytes[tensor.dtype] += tensor.nbytes
        return StepNeeds(
            state_bytes=state_bytes,
            temporary_bytes=ledger.highest.residual,
            keys=frozenset(optimizer.state[weight]),
            scalars_on_device=frozenset(
                key for key, value in state.items() if not value.dim() and value.device == weight.device
            ),
        )
