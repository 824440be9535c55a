"""Comparison of ranks that train with HiFT: settings before every step, weights in every cycle."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from slivertune.core.sliver import OWN_GRADIENTS
from slivertune.hift import HiFT
from slivertune.hift.rotation import scheduled_lr
from slivertune.parallel.consistency.headers import UNKNOWN, Header, Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat, comparable


class ConsistencyCheck:
    """Records this rank's position and compares the ranks for the lifetime of the optimizer.

    Before every step it compares positions and settings. At the end of every cycle, and on every call of `compare`, it
    compares the results.

    Args:
        hift: The optimizer that steps on every rank; its hooks alone keep this alive.
        heartbeat: Heartbeat that records the position.
        with_weights: Whether every rank holds the same whole weights, whose bits are compared, too.
        has_own: Whether there are gradients of this rank that are not averaged yet.
        after_step: Function called after each step.
    """

    def __init__(
        self,
        hift: HiFT,
        heartbeat: Heartbeat,
        *,
        with_weights: bool,
        has_own: Callable[[], bool] = lambda: False,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._hift = weakref.proxy(hift)
        self._heartbeat = heartbeat
        self._with_weights = with_weights
        self._has_own = has_own
        self._after_step = after_step
        self._steps = hift.rotation.steps
        self._group = hift.active_group
        self._bits: torch.Tensor | None = None
        hift.register_step_pre_hook(self._before)
        hift.register_step_post_hook(self._after)
        self._note()

    def meet(self, stage: Stage) -> None:
        """Check that every rank is about to begin the same stage at the same update and group. A collective.

        Args:
            stage: Stage that this rank is about to begin.

        Raises:
            RuntimeError: On every rank; says where each is.
        """
        self._heartbeat.meet(header_of(self._hift, stage))

    @torch.no_grad()
    def compare(self) -> None:
        """Compare all values that must agree between ranks, at any point of the cycle. A collective.

        Raises:
            RuntimeError: On every rank; names the value or weight that differs.
        """
        fingerprint = self._fingerprint()
        if self._with_weights:
            for name, parameter in self._hift.turns.hooks.model.named_parameters():
                fingerprint[f"the sum of the bits of {name}"] = int(self._sum_of_exact_bits(parameter))
        self._heartbeat.compare(fingerprint, header_of(self._hift, Stage.SAVING))

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._steps, self._group = self._hift.rotation.steps, self._hift.active_group
        is_reached = None
        if all(closure is None for closure in (*args[1:], kwargs.get("closure"))):
            is_reached = self._hift.has_gradient()
        self._heartbeat.meet(header_of(self._hift, Stage.STEPPING, is_reached), applied_settings(self._hift))
        if is_reached and self._has_own():
            raise RuntimeError(OWN_GRADIENTS)

    @torch.no_grad()
    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._after_step()
        if self._hift.rotation.steps == self._steps:
            return
        self._note()
        if self._with_weights and self._hift.rotation.steps % self._hift.config.steps_per_group == 0:
            for weight in self._hift.weights_of(self._group):
                bits = self._sum_of_bits(weight.trained)
                self._bits = bits if self._bits is None else self._bits.to(bits.device) * 31 + bits
        if self._hift.rotation.starts_cycle:
            fingerprint = self._fingerprint()
            if self._bits is not None:
                fingerprint["the sum of the weights' bits"] = int(self._bits)
            self._bits = None
            self._heartbeat.compare(fingerprint, header_of(self._hift, Stage.COMPARING))

    def _sum_of_bits(self, parameter: torch.Tensor) -> torch.Tensor:
        """Sum the bits that the device holds of a weight: the weight itself, or its codes if it is quantised."""
        held = self._hift.turns.parked.quantized_weight(parameter)
        if held is None:
            return sum_of_bits(parameter)
        return torch.stack([sum_of_bits(each) for each in held.tensors()]).sum()

    def _sum_of_exact_bits(self, parameter: torch.Tensor) -> torch.Tensor:
        held = self._hift.turns.parked.quantized_weight(parameter)
        return sum_of_bits(parameter if held is None else held.exact())

    def _fingerprint(self) -> dict[str, object]:
        return {
            "updates": self._hift.updates,
            "the group whose turn it is": self._hift.active_group,
            "held_lr": comparable(self._hift.held_lr),
        }

    def _note(self) -> None:
        self._heartbeat.enter(self._hift.updates, f"group {self._hift.active_group}")


def header_of(hift: HiFT, stage: Stage, is_reached: bool | None = None) -> Header:
    """Make the header of this rank.

    Args:
        hift: The optimizer.
        stage: Stage that the rank is about to begin.
        is_reached: Whether the active group has a gradient; None if it is not known yet.
    """
    return Header(
        stage,
        hift.updates,
        hift.active_group,
        sum(hift.skipped_turns.values()),
        gradients=UNKNOWN if is_reached is None else int(is_reached),
    )


def applied_settings(hift: HiFT) -> dict[str, object]:
    """Collect the settings of the coming update: learning rates (held or scheduled), hyperparameters, compilation.

    Args:
        hift: The optimizer.
    """
    settings: dict[str, object] = {"compilation of steps in tiles": hift.turns.compiles_steps}
    rates = hift.rotation.to_apply(scheduled_lr(hift.param_groups))
    for index, (param_group, rate) in enumerate(zip(hift.param_groups, rates, strict=True)):
        settings[f"the learning rate of param group {index}"] = comparable(rate)
        for key, value in param_group.items():
            if key not in ("params", "lr"):
                settings[f"{key} of param group {index}"] = comparable(value)
    return settings


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's elements as integers, in int64 on its device. The sum is cheap, and changes with any single bit.

    Args:
        tensor: Tensor of any dtype of 1, 2, 4 or 8 bytes.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.detach().view(integers).sum(dtype=torch.int64)
