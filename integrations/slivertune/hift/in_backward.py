"""Steps inside the backward (`gradients="stepped"`): the stepped weights, and whether their backward has ended.

With accumulation, only an update's last backward steps. Gradients of earlier ones are offloaded to the host until then.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from slivertune.core.ledger import claim
from slivertune.core.module_hook import ModuleHook
from slivertune.core.sliver import RECOVERY
from slivertune.core.torch_internals import (
    NO_BACKWARD,
    at_end_of_backward,
    running_backward,
    version_of,
)
from slivertune.hift.chunk import Weight
from slivertune.hift.gradient_placeholder import GradientPlaceholder
from slivertune.hift.gradient_routes import DeviceGradients, Steps
from slivertune.hift.host_gradients import HostGradients
from slivertune.hift.layers_above import LayersAbove
from slivertune.hift.offloaded_gradient import OffloadedGradient, norm_of
from slivertune.hift.parts import Turn
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


class SteppedGradients(DeviceGradients):
    """Steps each weight of the active group as soon as its gradient is complete, and frees the gradient.

    An update is open from its first gradient to `end`. Anything that would leave it half done is an error, at once or
    at the next gradient.

    Args:
        steps: Functions that it calls.
        weights: Trained weights of all groups.
        earlier: Route of the gradients of an update's earlier backward passes.
        above: Owner of the steps of the layers above the active group, if these step, too.
    """

    refusal_of_scaler = (
        "a GradScaler unscales gradients after the backward, and gradients='stepped' has updated the weights by scaled "
        "gradients before. Start again, in bf16 or with gradients='device'"
    )
    takes_closures = False

    def __init__(
        self, steps: Steps, weights: Mapping[str, Weight], earlier: HostGradients, above: LayersAbove | None
    ) -> None:
        super().__init__(steps, None)
        self._weight_of = {id(weight.parameter): weight for weight in weights.values()}
        self._earlier = earlier
        self._above = above
        self._num_accumulating = 0
        self._stepped: set[str] = set()
        self._arrived: set[str] = set()
        """Weights whose gradients were accumulated on this rank since the last update."""
        self._running: set[int] = set()
        self._broken: str | None = None
        self._hooks: list[RemovableHandle] = []
        self.waits_for_means = False
        """Whether a complete gradient is this rank's alone, and `on_mean` follows."""

    @override
    def attach(self, model: nn.Module) -> Callable[[], None]:
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
        return self.release

    @override
    def begin_turn(self, turn: Turn) -> None:
        super().begin_turn(turn)
        self._earlier.others = self.beside
        self._earlier.begin_turn(turn)

    @property
    @override
    def host_bytes(self) -> int:
        return self._earlier.host_bytes

    @property
    @override
    def beside(self) -> Sequence[Weight]:
        return () if self._above is None else self._above.weights

    @override
    def check_closed(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if self._stepped:
            raise RuntimeError("an update is open: a backward has stepped weights. Call step() before state_dict()")

    @override
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
        self.begin_backward()
        if self._is_accumulating():
            if self.waits_for_means:
                self._drop_waiting()
                raise RuntimeError(STEPPED_ONCE)
            self._earlier.take(parameter)
            return
        claim(gradient, "gradients")
        if not self.waits_for_means or not parameter.numel():  # an empty gradient is in no mean
            self._begin_and_step(weight)

    def on_mean(self, parameter: nn.Parameter) -> None:
        """Step a weight whose gradient is the mean over all ranks. Parameters that HiFT does not train are left alone.

        Raises:
            RuntimeError: As `on_gradient`.
        """
        weight = self._weight_of.get(id(parameter))
        if weight is None:
            return
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
            self._steps.begin()

    def _step_now(self, weight: Weight) -> None:
        parameter = weight.parameter
        self._stepped.add(weight.name)
        gradient = parameter.grad
        assert gradient is not None
        norm = None if isinstance(gradient, OffloadedGradient) else norm_of(gradient)
        try:
            with self._steps.stepping():
                if self._above is not None and self._above.holds(weight):
                    self._above.step(weight)
                    return  # the norm is that of the active group
                self._steps.step((weight,))
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

    @override
    def close(self) -> None:
        """Check that the update is whole, after its backward, and step what its last backward has not reached."""
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

    @override
    def collect(self) -> bool:
        return bool(self._stepped)

    def _with_gradient(self) -> list[str]:
        return [weight.name for weight in self._weight_of.values() if weight.parameter.grad is not None]

    @override
    def end(self) -> None:
        self._stepped.clear()
        self._arrived.clear()
        self._earlier.end()

    @override
    def begin_load(self) -> None:
        """Forget an open update, since all weights and state are replaced."""
        self.drop(list(self._weight_of.values()))
        self.end()
        self._running.clear()
        self._broken = None

    @contextmanager
    @override
    def accumulating(self) -> Iterator[None]:
        self._num_accumulating += 1
        try:
            yield
        finally:
            self._num_accumulating -= 1

    def _is_accumulating(self) -> bool:
        return self._num_accumulating > 0 or _is_accumulating_by_accelerate()

    @override
    def wait_for_means(self) -> Callable[[nn.Parameter], None]:
        self.waits_for_means = True
        return self.on_mean

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

    @override
    def begin_backward(self) -> None:
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
                self._earlier.load_for_step()
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


def _is_accumulating_by_accelerate() -> bool:
    """Return whether accelerate or the Trainer says that the current micro-batch is not its update's last."""
    state = sys.modules.get("accelerate.state")
    return state is not None and not state.GradientState().sync_gradients
