"""Updates that are applied in the next forward, each layer's just before it runs (`update="forward"`).

The pieces of a group's state then pass through the device beside the layers below, and not in a step of their own. What
computes stands in the same order as ever: no weight is read between the step and its update, or the update comes first.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slivertune.core.hyperparameters import own_hyperparameters
from slivertune.core.layers import Layer
from slivertune.core.module_hook import ModuleHook, StandIn, put_stand_in
from slivertune.core.torch_internals import apply_of, compiled_call_of, version_of
from slivertune.hift.piece import ParamGroups, Weight
from slivertune.hift.residency import ResidentGroup
from slivertune.hift.rotation import LearningRate


@dataclass(slots=True)
class _Update:
    """What a step has left to be applied."""

    residency: ResidentGroup
    param_groups: ParamGroups
    held_lr: Sequence[LearningRate]
    gradients: dict[int, torch.Tensor | None]
    """By identity of the weight's parameter; None of one that got none."""
    versions: dict[int, int]
    """By identity: how often the weight had been written to at its step."""
    to_apply: list[tuple[int, list[Weight]]]
    """Layers by index, from the bottom up, with their weights."""
    failure: str | None = None
    """What went wrong while it was applied."""

    def waiting(self) -> list[Weight]:
        """Weights that are still to be stepped."""
        return [weight for _, weights in self.to_apply for weight in weights]

    def check(self) -> None:
        """Check that nothing has failed, and that nobody has written to what waits, or brought it another gradient.

        Raises:
            RuntimeError: Naming the weight and the way out.
        """
        if self.failure is not None:
            raise RuntimeError(self.failure)
        for weight in self.waiting():
            parameter = weight.parameter
            if version_of(parameter) != self.versions[id(parameter)]:
                raise RuntimeError(
                    f"{weight.name} was written to while its update waited for the next forward (update='forward'); "
                    "call optimizer.flush() before weights are written, or set update='step'"
                )
            if parameter.grad is not None:
                raise RuntimeError(
                    f"{weight.name} got a gradient while its update waited for the next forward (update='forward'); "
                    "run a forward between a step and the next backward, or set update='step'"
                )


class ForwardUpdates:
    """Holds an update from its step to the next forward, and applies it there; knows nothing of the optimizer.

    Args:
        layers: All layers that are trained, from the bottom up.
        on_loaded: Called where all state of the update is on the device or on its way.
        on_end: Called when all of an update is applied.
    """

    def __init__(self, layers: Sequence[Layer], on_loaded: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._layers = layers
        self._on_loaded = on_loaded
        self._on_end = on_end
        self._layer_of = {name: index for index, layer in enumerate(layers) for name in layer.parameter_names}
        kinds = [layer.kind for layer in layers]
        self._first_block = kinds.index("block") if "block" in kinds else len(kinds)
        self._update: _Update | None = None
        self._blocks: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._undo: list[Callable[[], None]] = []

    @property
    def residency(self) -> ResidentGroup | None:
        """The owner of the state that is still to be stepped; None where there is none."""
        return None if self._update is None else self._update.residency

    def hold(self, residency: ResidentGroup, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        """Take over a group's gradients, with the hyperparameters of this moment.

        Args:
            residency: The group's owner of state; it has begun its update.
            param_groups: The optimizer's.
            held_lr: What is applied, one a param group.
        """
        assert self._update is None
        by_layer: dict[int, list[Weight]] = {}
        for weight in residency.weights:
            by_layer.setdefault(self._layer_of[weight.name], []).append(weight)
        self._update = _Update(
            residency,
            [own_hyperparameters(group) for group in param_groups],
            list(held_lr),
            {id(weight.parameter): weight.parameter.grad for weight in residency.weights},
            {id(weight.parameter): version_of(weight.parameter) for weight in residency.weights},
            sorted(by_layer.items()),
        )
        residency.load_gradients()
        residency.prefetch()
        for weight in residency.weights:
            weight.parameter.grad = None

    @contextmanager
    def gradients_in_place(self) -> Iterator[None]:
        """Inside, `.grad` is what it was at the step, for what loads or steps it."""
        update = self._update
        if update is None:
            yield
            return
        for weight in update.waiting():
            weight.parameter.grad = update.gradients[id(weight.parameter)]
        try:
            yield
        finally:
            for weight in update.waiting():
                weight.parameter.grad = None

    def begin_forward(self, model: nn.Module) -> None:
        """A forward that trains begins: apply what may be read before the blocks.

        Raises:
            RuntimeError: If a block is compiled, whose graph would not wait for its update.
        """
        if self._update is None:
            return
        if any(compiled_call_of(module) is not None for module in (model, *self._blocks)):
            raise RuntimeError(
                "update='forward' applies a layer's update in a hook before its forward, and a compiled layer does not "
                "wait for that; leave the model uncompiled, or set update='step'"
            )
        self._apply(self._first_block - 1)

    def flush(self) -> None:
        """Apply all that waits."""
        self._apply(len(self._layers) - 1)

    def forget(self) -> None:
        """Apply what waits, or give up what can't be applied: what is loaded takes its place."""
        self._flush_or_give_up()

    def attach(self, model: nn.Module) -> None:
        """Hook the model."""
        own = weakref.proxy(self)

        def flush(*ignored: Any) -> None:
            ForwardUpdates.flush(own)

        def forget(*ignored: Any) -> None:
            ForwardUpdates.forget(own)

        modules = dict(model.named_modules())
        indices = {layer.name: index for index, layer in enumerate(self._layers) if layer.kind == "block"}
        self._blocks = [modules[name] for name in indices if name in modules]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for path, module in modules.items():
            found = [self._layer_of.get(names[id(each)], -1) for each in module.parameters(recurse=False)]
            index = max([indices.get(path, -1), *found])
            self._handles += [
                module.register_forward_pre_hook(
                    _FlushingHook(lambda *_, index=index: ForwardUpdates._apply(own, index), flush)
                ),
                module.register_state_dict_pre_hook(ModuleHook(flush)),
                module.register_load_state_dict_pre_hook(ModuleHook(forget)),
            ]
        stand_ins = {
            "train": _FlushingTrain(model.train, flush),  # which `eval` calls
            "_apply": _FlushingCall(apply_of(model), flush),  # which `to` and its like call
        }
        for name, stand_in in stand_ins.items():
            self._undo.append(put_stand_in(model, name, stand_in))
        if self._blocks:
            # What a loss reads of the head may be read without the head's forward.
            self._handles.append(self._blocks[-1].register_forward_hook(ModuleHook(flush)))

    def release(self) -> None:
        """Apply what waits, and take the hooks off; what can't be applied is given up with a warning."""
        error = self._flush_or_give_up()
        if error is not None:
            warnings.warn(f"HiFT was dropped, and an update with it: {error}", RuntimeWarning, stacklevel=2)
        for handle in self._handles:
            handle.remove()
        for undo in self._undo:
            undo()
        self._handles, self._undo = [], []

    def _flush_or_give_up(self) -> RuntimeError | None:
        """Apply what waits; why it was given up, if it can't be applied."""
        try:
            self.flush()
        except RuntimeError as error:
            update, self._update = self._update, None
            assert update is not None
            update.residency.release()
            self._on_end()
            return error
        return None

    def _apply(self, last: int) -> None:
        """Apply the updates of all layers up to one, from the bottom up: a piece may reach from one into the next."""
        update = self._update
        if update is None or not update.to_apply or update.to_apply[0][0] > last:
            return
        device = update.residency.weights[0].parameter.device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            update.check()
            with self.gradients_in_place():
                while update.to_apply and update.to_apply[0][0] <= last:
                    index, weights = update.to_apply[0]
                    try:
                        update.residency.step(weights, update.param_groups, update.held_lr)
                    except BaseException as error:
                        update.failure = (
                            f"an update failed at {self._layers[index].name} ({type(error).__name__}), in the forward "
                            "after its step, and the layers below have it; continue from the last checkpoint "
                            "(load_state_dict of the model and of the optimizer), or start again"
                        )
                        raise
                    del update.to_apply[0]
            for weight in update.waiting():
                # A piece may have reached into the next layer.
                update.versions[id(weight.parameter)] = version_of(weight.parameter)
            if not update.to_apply:
                self._update = None
                update.residency.end()
                self._on_end()
            elif update.residency.has_loaded_all:
                self._on_loaded()


class _FlushingHook(ModuleHook):
    """A hook that also applies what waits before its module is copied or pickled; in the copy it does nothing.

    Args:
        function: What to call.
        flush: Applies what waits.
    """

    def __init__(self, function: Callable[..., Any], flush: Callable[..., Any]) -> None:
        super().__init__(function)
        self._flush = flush

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        self._flush()
        return super().__deepcopy__(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        self._flush()
        return super().__reduce__()


class _FlushingCall(StandIn):
    """A method of a model that applies what waits first.

    Args:
        function: The method.
        flush: Applies what waits.
    """

    def __init__(self, function: Callable[..., Any], flush: Callable[..., Any]) -> None:
        super().__init__(function)
        self._flush = flush

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply what waits, and call the method."""
        self._flush()
        return self.function(*args, **kwargs)


class _FlushingTrain(_FlushingCall):
    """`Module.train`, which applies what waits where training ends; the Trainer calls it before every step."""

    def __call__(self, mode: bool = True) -> Any:
        """Apply what waits unless training goes on, and call the method."""
        if not mode:
            self._flush()
        return self.function(mode)
