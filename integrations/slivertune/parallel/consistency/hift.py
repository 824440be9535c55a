"""Keeps ranks that train with HiFT together: the same settings in every step, the same weights in every cycle."""

from collections.abc import Callable
from typing import Any

import torch

from slivertune.hift import HiFT
from slivertune.hift.rotation import scheduled_lr
from slivertune.parallel.consistency.headers import UNKNOWN, Header, Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat, comparable


class ConsistencyCheck:
    """Notes where this rank is, and compares the ranks, as long as the optimizer lives.

    Before every step: where they are and what they apply. At the end of every cycle, and whenever `compare` is called:
    what came out of it.

    Args:
        hift: The optimizer that steps on every rank.
        heartbeat: Where to note.
        with_weights: Whether every rank holds the same whole weights, whose bits are compared too.
        after_step: Called after each step.
    """

    def __init__(
        self,
        hift: HiFT,
        heartbeat: Heartbeat,
        *,
        with_weights: bool,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._hift = hift
        self._heartbeat = heartbeat
        self._with_weights = with_weights
        self._after_step = after_step
        self._steps = hift.rotation.steps
        self._group = hift.active_group
        self._bits: torch.Tensor | None = None
        hift.register_step_pre_hook(self._before)
        hift.register_step_post_hook(self._after)
        self._note()

    def meet(self, stage: Stage) -> None:
        """Check that every rank is about to do the same at the same update and group. A collective.

        Args:
            stage: What this rank is about to do.

        Raises:
            RuntimeError: On every rank, saying where each is.
        """
        self._heartbeat.meet(header_of(self._hift, stage))

    @torch.no_grad()
    def compare(self) -> None:
        """Compare everything that all ranks must have alike, wherever the cycle stands. A collective.

        Raises:
            RuntimeError: On every rank, naming what differs, each weight by its name.
        """
        fingerprint = self._fingerprint()
        if self._with_weights:
            for weight in self._hift.trained_weights:
                fingerprint[f"the sum of the bits of {weight.name}"] = int(self._sum_of_exact_bits(weight.trained))
        self._heartbeat.compare(fingerprint, header_of(self._hift, Stage.SAVING))

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._steps, self._group = self._hift.rotation.steps, self._hift.active_group
        is_reached = None
        if all(closure is None for closure in (*args[1:], kwargs.get("closure"))):
            is_reached = self._hift.has_gradient()
        self._heartbeat.meet(header_of(self._hift, Stage.STEPPING, is_reached), applied_settings(self._hift))

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
        """Of what the device holds of a weight: itself, or the codes that it waits in."""
        waiting = self._hift.waiting_weight(parameter)
        if waiting is None:
            return sum_of_bits(parameter)
        return torch.stack([sum_of_bits(each) for each in waiting.tensors()]).sum()

    def _sum_of_exact_bits(self, parameter: torch.Tensor) -> torch.Tensor:
        waiting = self._hift.waiting_weight(parameter)
        return sum_of_bits(parameter if waiting is None else waiting.exact())

    def _fingerprint(self) -> dict[str, object]:
        return {
            "updates": self._hift.updates,
            "the group whose turn it is": self._hift.active_group,
            "held_lr": comparable(self._hift.held_lr),
        }

    def _note(self) -> None:
        self._heartbeat.enter(self._hift.updates, f"group {self._hift.active_group}")


def header_of(hift: HiFT, stage: Stage, is_reached: bool | None = None) -> Header:
    """Where this rank is.

    Args:
        hift: The optimizer.
        stage: What the rank is about to do.
        is_reached: Whether the group whose turn it is has a gradient; None where it is not known yet.
    """
    return Header(
        stage,
        hift.updates,
        hift.active_group,
        sum(hift.skipped_turns.values()),
        gradients=UNKNOWN if is_reached is None else int(is_reached),
    )


def applied_settings(hift: HiFT) -> dict[str, object]:
    """What the coming update will apply: its learning rates, held or the schedule's, and all other hyperparameters.

    Args:
        hift: The optimizer.
    """
    settings: dict[str, object] = {}
    rates = hift.rotation.to_apply(scheduled_lr(hift.param_groups))
    for index, (param_group, rate) in enumerate(zip(hift.param_groups, rates, strict=True)):
        settings[f"the learning rate of param group {index}"] = comparable(rate)
        for key, value in param_group.items():
            if key not in ("params", "lr"):
                settings[f"{key} of param group {index}"] = comparable(value)
    return settings


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's elements as integers, int64 on its device: cheap, and another if one bit is.

    Args:
        tensor: Any dtype of 1, 2, 4 or 8 bytes.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.detach().view(integers).sum(dtype=torch.int64)
