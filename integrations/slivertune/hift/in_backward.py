"""Steps inside the backward (`gradients="stepped"`): the stepped weights, and whether their backward has ended.

With accumulation, only an update's last backward steps. Gradients of earlier ones are offloaded to the host until then.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slivertune.core.ledger import claim
from slivertune.core.module_hook import ModuleHook
from slivertune.core.sliver import RECOVERY
from slivertune.core.torch_internals import (
    NO_BACKWARD,
    at_end_of_backward,
    running_backward,
    version_of,
)
from slivertune.hift.gradient_placeholder import GradientPlaceholder
from slivertune.hift.host_gradients import HostGradients
from slivertune.hift.offloaded_gradient import OffloadedGradient, norm_of
from slivertune.hift.piece import Weight
from slivertune.hift.unsupported import STEPPED_ONCE


class SteppedGradient(GradientPlaceholder):
    """Stands in `.grad` of a weight that was stepped in the backward, until `step`.

    It knows the gradient's 2-norm, so that the total norm can be computed. Any other use raises an error.

    Args:
        gradient: Gradient that it stands for.
        norm: 2-norm of the gradient, without dimensions.
        refuse: Function to call when a backward adds to it; raises.
    """

    _one: tuple[torch.Tensor, int] | None = None
    """Factor that was last found to be 1, the same tensor for all gradients of a clipping, and its version."""

    def __init__(self, gradient: torch.Tensor, norm: torch.Tensor, refuse: Callable[[], None]) -> None:
        self._norm = norm
        self._refuse = refuse

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the norm, accept a clipping that leaves gradients as they are, and refuse anything else."""
        norm_is_asked = func is torch.ops.aten.linalg_vector_norm.default and not kwargs
        if norm_is_asked and all(value == 2.0 for value in args[1:]):
            return args[0]._norm.clone()
        if func is torch.ops.aten.mul_.Tensor and args[0]._is_one(args[1]):
            return args[0]
        if func is torch.ops.aten.add_.Tensor and running_backward() != NO_BACKWARD:
            args[0]._refuse()
        raise RuntimeError(
            "gradients='stepped' has stepped on this gradient in the backward and dropped it, so it can't be clipped, "
            "read or changed. Leave that out, or set gradients='host', which takes about as little memory"
        )

    @staticmethod
    def _is_one(factor: Any) -> bool:
        if not isinstance(factor, torch.Tensor):
            return False
        known = SteppedGradient._one
        if known is not None and known[0] is factor and known[1] == version_of(factor):
            return True
        is_one = bool((factor == 1).all())
        SteppedGradient._one = (factor, version_of(factor)) if is_one else None
        return is_one


class BackwardSteps:
    """Steps each weight of the active group as soon as its gradient is complete, and frees the gradient.

    An update is open from its first gradient to `end`. Anything that would leave it half done is an error, at once or
    at the next gradient.

    Args:
        weights: Trained weights of all groups.
        begin: Function to call before the first weight of an update. If it fails, nothing was updated.
        step_weight: Function that steps one weight from its gradient, frees the gradient, and returns whether its norm
            counts: those of the active group do.
        is_accumulating: Function that returns whether the running backward is not its update's last.
        host_gradients: Function that returns the owner of the gradients of earlier backward passes.
        load_gradients: Function to call when the last backward begins; loads gradients that are offloaded.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        begin: Callable[[], None],
        step_weight: Callable[[Weight], bool],
        *,
        is_accumulating: Callable[[], bool],
        host_gradients: Callable[[], HostGradients],
        load_gradients: Callable[[], None],
    ) -> None:
        self._weight_of = {id(weight.parameter): weight for weight in weights.values()}
        self._begin = begin
        self._step_weight = step_weight
        self._is_accumulating = is_accumulating
        self._host_gradients = host_gradients
        self._load_gradients = load_gradients
        self._stepped: set[str] = set()
        self._arrived: set[str] = set()
        """Weights whose gradients were accumulated on this rank since the last update."""
        self._running: set[int] = set()
        self._broken: str | None = None
        self._hooks: list[RemovableHandle] = []
        self.waits_for_means = False
        """Whether a complete gradient is this rank's alone, and `on_mean` follows."""

    def attach(self, model: nn.Module) -> None:
        """Put the hooks on a model. An open update stays open."""
        first = next(iter(self._weight_of.values())).parameter
        parent = next(
            module for module in model.modules() if any(each is first for each in module.parameters(recurse=False))
        )
        self._hooks = [
            model.register_forward_pre_hook(ModuleHook(self._before_forward)),
            # Inside of the model's forward, after accelerate has switched autocast on.
            parent.register_forward_pre_hook(_refuse_fp16_autocast),
        ]

    def check_closed(self) -> None:
        """Check that no update is open or half done.

        Raises:
            RuntimeError: If one is.
        """
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if self._stepped:
            raise RuntimeError("an update is open: a backward has stepped weights. Call step() before state_dict()")

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Step a weight whose gradient has just been accumulated, or offload the gradient if more are to come.

        Raises:
            RuntimeError: If it was stepped already in this update, or an earlier error left the update half done.
        """
        weight, gradient = self._weight_of[id(parameter)], parameter.grad
        is_first = weight.name not in self._arrived
        self._arrived.add(weight.name)
        # Its mean may have come first, and with it the step.
        is_in_mean = self.waits_for_means and is_first and isinstance(gradient, SteppedGradient)
        if gradient is None or is_in_mean:
            return
        if self._broken is not None or weight.name in self._stepped:
            self._refuse_second(weight)
        self.watch_backward()
        if self._is_accumulating():
            if self.waits_for_means:
                self._drop_waiting()
                raise RuntimeError(STEPPED_ONCE)
            assert isinstance(parameter, nn.Parameter)
            self._host_gradients().take(parameter)
            return
        claim(gradient, "gradients")
        if not self.waits_for_means or not parameter.numel():  # an empty gradient is in no mean
            self._begin_and_step(weight)

    def on_mean(self, parameter: nn.Parameter) -> None:
        """Step a weight whose gradient is the mean over all ranks.

        Raises:
            RuntimeError: As `on_gradient`.
        """
        weight = self._weight_of[id(parameter)]
        if self._broken is not None or weight.name in self._stepped:
            self._refuse_second(weight)
        self._begin_and_step(weight)

    def _begin_and_step(self, weight: Weight) -> None:
        try:
            self._begin_once()
        except BaseException:
            weight.parameter.grad = None
            self._drop_waiting()
            raise
        self._step_now(weight)

    def _drop_waiting(self) -> None:
        """Drop the gradients of a backward that has stepped nothing, but not the sums of earlier ones."""
        self._arrived.clear()
        for weight in self._weight_of.values():
            if not isinstance(weight.parameter.grad, OffloadedGradient):
                weight.parameter.grad = None

    def _refuse_second(self, weight: Weight) -> None:
        # The rest of this backward must not be stepped either.
        weight.parameter.grad = None
        if self._broken is None:
            self._broken = (
                f"{weight.name} got a second gradient before step(), and gradients='stepped' steps on the first. Call "
                "step() after every backward. To accumulate over several, run all but the last in `with "
                "optimizer.accumulating():` (the Trainer and accelerate's accumulate() do so themselves). If "
                "a layer is used twice under reentrant checkpointing, set gradients='host'"
            )
        raise RuntimeError(self._broken)

    def _begin_once(self) -> None:
        if not self._stepped:
            self._begin()

    def _step_now(self, weight: Weight) -> None:
        parameter = weight.parameter
        self._stepped.add(weight.name)
        gradient = parameter.grad
        assert gradient is not None
        norm = None if isinstance(gradient, OffloadedGradient) else norm_of(gradient)
        try:
            if not self._step_weight(weight):
                return
            if isinstance(gradient, OffloadedGradient):
                norm = norm_of(torch.stack(gradient.part_norms))
            assert norm is not None
            parameter.grad = SteppedGradient(gradient, norm, partial(self._refuse_second, weight))
        except BaseException as error:
            self._broken = (
                f"the update failed at {weight.name} ({type(error).__name__}), after {len(self._stepped) - 1} other "
                f"weights of its group were stepped. {RECOVERY}"
            )
            raise

    def close(self) -> bool:
        """Check that the update is whole, after its backward.

        Returns:
            Whether there was an update.

        Raises:
            RuntimeError: If the update is half done, or a gradient did not come from a backward.
        """
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if self._running and (self._stepped or self._with_gradient()):
            stepped = (
                f"after {len(self._stepped)} weights of its group were stepped, {next(iter(self._stepped))} among them"
                if self._stepped
                else "before a weight was stepped"
            )
            self._broken = f"the backward of this update did not end (an error, or Ctrl-C), {stepped}. {RECOVERY}"
            raise RuntimeError(self._broken)
        # Gradients of earlier backward passes, whose weights the last one has not reached.
        for weight in [w for w in self._weight_of.values() if isinstance(w.parameter.grad, OffloadedGradient)]:
            self._begin_once()  # if it fails, the gradient stays for the next call
            self._step_now(weight)
        self._drop_stepped()
        if given := self._with_gradient():
            raise RuntimeError(
                f"{given[0]} has a gradient that did not come from a backward, and gradients='stepped' steps only "
                "inside the backward. Set gradients='device' to set gradients by hand"
            )
        return bool(self._stepped)

    def _with_gradient(self) -> list[str]:
        return [weight.name for weight in self._weight_of.values() if weight.parameter.grad is not None]

    def end(self) -> None:
        """Forget the weights of an update that was closed, when it is counted."""
        self._stepped.clear()
        self._arrived.clear()

    def forget(self) -> None:
        """Forget an open update, since all weights and state are replaced."""
        self._drop_stepped()
        self.end()
        self._running.clear()
        self._broken = None

    def release(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._drop_stepped()

    def _drop_stepped(self) -> None:
        for weight in self._weight_of.values():
            if isinstance(weight.parameter.grad, SteppedGradient):
                weight.parameter.grad = None

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if not self._stepped and torch.is_grad_enabled() and running_backward() == NO_BACKWARD:
            # These backward passes failed before they stepped anything.
            if self._running:
                self._drop_waiting()
            self._running.clear()

    def watch_backward(self) -> None:
        """Note that the running backward has begun, and note its end if it ends without an error.

        Under reentrant checkpointing, gradients arrive in backward passes inside of the one that counts. Call this when
        that one begins.
        """
        task = running_backward()
        if task == NO_BACKWARD or task in self._running:
            return
        if not self._running:
            if self.waits_for_means and self._stepped:
                self._broken = self._broken or STEPPED_ONCE
                raise RuntimeError(self._broken)
            if not self._is_accumulating():
                self._load_gradients()
        self._running.add(task)
        # After the other functions at that time, in which the last means come.
        at_end_of_backward(lambda: at_end_of_backward(lambda: self._running.discard(task)))


def _refuse_fp16_autocast(module: nn.Module, inputs: Any) -> None:
    device = next(module.parameters(recurse=False)).device.type
    is_fp16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    if is_fp16 and torch.is_grad_enabled():
        raise RuntimeError(
            "fp16 autocast needs a GradScaler, which unscales gradients after the backward, and gradients='stepped' "
            "has stepped on them by then. Use bf16, or gradients='device'"
        )


def is_accumulating_by_accelerate() -> bool:
    """Return whether accelerate or the Trainer says that the current micro-batch is not its update's last."""
    state = sys.modules.get("accelerate.state")
    return state is not None and not state.GradientState().sync_gradients
