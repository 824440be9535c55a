"""SFT's changes to a model: hooks or layers on the trained tensors, the deltas as parameters, and guards.

While they are on, SFT keeps `requires_grad` as it needs it: if other code changes it, SFT restores it and drops the
dense gradient. A trained tensor that was replaced or cast is an error, and so is a new parameter that requires a
gradient. Another optimizer that steps the deltas, or holds the trained weights, is an error before its step. The guards
cost a walk over the model's modules per training forward and per `step`, and read no tensor.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slivertune.core.anchor import anchor
from slivertune.core.foreign_steps import forget_steps, refuse_step_of_other, watch_steps
from slivertune.core.module_hook import ModuleHook
from slivertune.core.outputs import tensors_of, with_tensors_replaced
from slivertune.core.parameters import held_parameters, settle_requires_grad
from slivertune.core.reentrant import RecordingCheck, ReentrantBlocks
from slivertune.core.sliver import IDLE_STEPS
from slivertune.core.torch_internals import at_end_of_backward, version_of
from slivertune.deltas.names import name_before
from slivertune.sft.config import PhiGradient
from slivertune.sft.delta_parameters import DELTA_PARAMETERS_NAME, DeltaParameters
from slivertune.sft.gradient_sync import GradientSync
from slivertune.sft.linear import DeltaLayer
from slivertune.sft.weight import SparseWeight


class ModelHooks:
    """Hooks, layers and delta parameters, which are put on and taken off together.

    Args:
        model: The model.
        weights: The trained tensors.
        delta_parameters: Module that holds their deltas.
        gradient_sync: Receiver of each gradient. It knows whether other ranks train unprepared: DDP's wrapper writes
            deltas.
        phi_gradient: Method for gradients in the layer form.
        optimizer: The only optimizer that may step the deltas.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[SparseWeight],
        delta_parameters: DeltaParameters,
        gradient_sync: GradientSync,
        phi_gradient: PhiGradient,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._model = model
        self._weights = weights
        self._owner = weights[0].target.module
        self._delta_parameters = delta_parameters
        self._gradient_sync = gradient_sync
        self._phi_gradient = phi_gradient
        self._optimizer = weakref.ref(optimizer)
        self._was_trainable = {name: p.requires_grad for name, p in model.named_parameters()}
        self.is_on = False
        """Whether the hooks are on the model."""
        self._handles: list[RemovableHandle | DeltaLayer | ReentrantBlocks] = []
        self._required: dict[int, tuple[nn.Parameter, bool]] = {}
        """Parameters of the model, by identity, each with whether it is to require a gradient."""
        self._trained: dict[int, str] = {}
        self._frozen: dict[int, str] = {}
        """Names of the parameters that are not trained, whoever has frozen them."""
        self._versions: list[int] = []
        self._recording = RecordingCheck()
        self._anchor = anchor(self._begin_backward)
        self._not_reached = list(weights)
        """Tensors without a gradient in the last step, or all of them before the first."""
        self._never_reached = {weight.name: None for weight in weights}
        self._num_noted = 0

    def put_on(self, *, with_delta_parameters: bool = True) -> None:
        """Freeze the model, and put a gradient hook or layer on each trained tensor.

        Args:
            with_delta_parameters: Whether the deltas become parameters of the model.
        """
        self.is_on = True
        self._model.requires_grad_(False)
        for at, weight in enumerate(self._weights):
            if weight.merged:
                parameter = weight.target.parameter.requires_grad_(True)
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_hook(at)))
            else:
                self._handles.append(DeltaLayer(weight, at, self._gradient_sync, self._phi_gradient))
        modules = {weight.target.module for weight in self._weights}
        self._reentrant = ReentrantBlocks(self._model, lambda block: not modules.isdisjoint(block.modules()))
        self._handles.append(self._reentrant)
        if not self._gradient_sync.communicator.is_alone:
            self._handles += self._gradient_sync.watch(self._model)
        # The deltas go on a layer, since a model that is a container would count them among its layers and call them.
        if with_delta_parameters:
            self._owner.add_module(DELTA_PARAMETERS_NAME, self._delta_parameters)
        self._begin_to_guard()

    def _begin_to_guard(self) -> None:
        self._trained = {id(weight.target.parameter): weight.name for weight in self._weights}
        deltas = [weight.phi for weight in self._weights]
        written = {id(weight.target.parameter) for weight in self._weights if weight.merged}
        self._required = {id(each): (each, id(each) in written) for each in self._model.parameters()}
        self._required |= {id(each): (each, True) for each in (*deltas, self._delta_parameters.witness)}
        self._frozen = {
            id(each): name
            for name, each in self._model.named_parameters()
            if id(each) not in self._trained and not self._required[id(each)][1]
        }
        # SFT's own writes leave the versions of the deltas unchanged.
        self._versions = [version_of(delta) for delta in deltas]
        self._handles += [
            self._model.register_forward_pre_hook(ModuleHook(self._before_forward)),
            self._model.register_forward_hook(ModuleHook(self._after_forward), always_call=True),
        ]
        watch_steps(self)

    def take_off(self) -> None:
        """Remove everything from the model, and leave it frozen."""
        forget_steps(self)
        for handle in self._handles:
            handle.remove()
        self._recording.end()
        self._handles, self._required, self._trained = [], {}, {}
        if hasattr(self._owner, DELTA_PARAMETERS_NAME):
            delattr(self._owner, DELTA_PARAMETERS_NAME)
        self.is_on = False

    def were_trainable(self) -> list[nn.Parameter]:
        """Return the parameters that required a gradient before the first `put_on`."""
        known = self._was_trainable
        return [each for name, each in self._model.named_parameters() if known.get(name_before(name, known))]

    def restore_requires_grad(self) -> None:
        """Restore `requires_grad` as it was before the first `put_on`."""
        for name, parameter in self._model.named_parameters():
            was_trainable = self._was_trainable.get(name_before(name, self._was_trainable))
            parameter.requires_grad_(parameter.requires_grad if was_trainable is None else was_trainable)

    def _gradient_hook(self, at: int) -> Callable[[torch.Tensor], None]:
        # Python's garbage collector does not see a tensor's hooks, so they must not hold the tensor.
        alive = weakref.ref(self)

        def take(parameter: torch.Tensor) -> None:
            if (hooks := alive()) is not None and parameter.grad is not None:
                weight, serial = hooks._weights[at], hooks._gradient_sync.begin()
                weight.take(parameter.grad)
                hooks._gradient_sync.show(at, parameter.grad.reshape(-1), 0, weight.indices, serial)
                parameter.grad = None

        return take

    def check(self) -> None:
        """Check that the model still has the tensors that SFT was built over.

        Raises:
            RuntimeError: If it has not; the error names the replaced, cast or added parameter, or the written deltas.
        """
        for weight, version in zip(self._weights, self._versions, strict=True):
            if version_of(weight.phi) != version:
                self._gradient_sync.communicator.check()
                raise RuntimeError(
                    f"the deltas of {weight.name} were written by something else than SFT, which trains them. They are "
                    "parameters of the model only for clipping and scaling. Call detach() before anything else trains "
                    "the model, and set its weights in place of the deltas"
                )
        missing, added, modules = dict(self._trained), [], set()
        for module, parameter in held_parameters(self._model):
            modules.add(id(module))
            if id(parameter) in self._required:
                missing.pop(id(parameter), None)
            elif parameter.requires_grad and not isinstance(module, DeltaParameters):
                added.append(parameter)
        if not all(weight.pretrained.is_whole for weight in self._weights):
            # FSDP2 exchanges the parameter for a while, in the same module.
            missing = {i: each.name for i, each in enumerate(self._weights) if id(each.target.module) not in modules}
        for name in missing.values():
            raise RuntimeError(
                f"{name} was replaced after SFT was built, so the model would not compute with the trained weight. "
                "Replace it (a new module, resize_token_embeddings, load_state_dict(assign=True), an offload) "
                "before SFT(...), or call detach() first and build a new SFT"
            )
        for weight in self._weights:
            weight.check_tensor()
        for new in added:
            name = next(name for name, each in self._model.named_parameters() if each is new)
            raise RuntimeError(
                f"{name} came into the model after SFT was built and requires a gradient, but SFT does not train it. "
                "Add it (an adapter, a new head, larger embeddings) before SFT(..., targets=[...]), or call "
                "requires_grad_(False) on it"
            )

    def check_shards(self) -> None:
        """Check that no other code has set trained entries of sharded weights.

        Raises:
            RuntimeError: If other code has; the error names the parameter.
        """
        found = [(weight.name, weight.is_changed_in_shards()) for weight in self._weights]
        changed = [(name, each) for name, each in found if each is not None]
        # The device is synchronised once.
        if changed and bool(torch.stack([each for _, each in changed]).any()):
            name = next(name for name, each in changed if each)
            raise RuntimeError(
                f"trained entries of {name} were changed outside of SFT (load_state_dict of the model) after "
                "the weights were sharded, which SFT can't follow. Load weights before "
                "slivertune.prepare or initialize, or load a checkpoint of this run, which includes the deltas"
            )

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Check the model before a training forward, and restore `requires_grad`."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.check()
            settle_requires_grad(self._required.values())
            self._reentrant.prepare()
            self._recording.begin(self._model, {weight.target.module: weight.name for weight in self._not_reached})

    def note_gradients(self) -> None:
        """Record the tensors without a gradient in the step that begins, whose modules the next forward watches."""
        self._not_reached = [weight for weight in self._weights if weight.phi.grad is None]
        if self._never_reached and len(self._not_reached) < len(self._weights):
            self._note_never_reached()

    def _note_never_reached(self) -> None:
        """Warn once of tensors that no gradient has reached in the first updates."""
        idle = {weight.name for weight in self._not_reached}
        self._never_reached = {name: None for name in self._never_reached if name in idle}
        self._num_noted += 1
        if self._never_reached and self._num_noted == IDLE_STEPS:
            first, *others = self._never_reached
            warnings.warn(
                f"no gradient has reached {first}{f' and {len(others)} more trained tensors' if others else ''} in the "
                f"first {IDLE_STEPS} updates, so their share of the trained weights has learnt nothing so far. If the "
                "loss does not depend on them, leave them out of SFTConfig(targets=...). If it reads their weights "
                "without calling their layers, use form='optimizer'",
                UserWarning,
                stacklevel=6,
            )
            self._never_reached = {}

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Freeze the model again when the backward begins, since checkpointed layers run once more in it.

        If a training forward reached no trained weight, its outputs are made to require gradients: a backward runs.
        """
        self._recording.end()
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        followed = [each for each in tensors_of(output) if each.is_floating_point() and each.requires_grad]
        for each in followed:
            each.register_hook(lambda gradient: self._begin_backward())
        if followed or not module.training:
            return None
        anchored = with_tensors_replaced(output, self._anchor)
        return None if anchored is output else anchored

    def _begin_backward(self) -> None:
        settle_requires_grad(self._required.values())
        at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        if self.is_on and all(weight.phi.grad is None for weight in self._weights):
            self._delta_parameters.give_zero()

    def refuse_foreign_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse the step of another optimizer that holds deltas or trained weights.

        Args:
            optimizer: Optimizer that is about to step.
        """
        refuse_step_of_other(
            optimizer,
            self._optimizer(),
            lambda: {id(weight.phi): weight.name for weight in self._weights} | self._trained,
            "SFT",
        )
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if id(parameter) in self._frozen:
                raise RuntimeError(
                    f"{type(optimizer).__name__} would step {self._frozen[id(parameter)]}, which SFT keeps frozen, so "
                    "it never gets a gradient. Name it in SFTConfig(targets=...), or call detach() on the SFT before "
                    "anything else trains the model"
                )
