"""Sees to it that what trains is what SFT says, whatever the script or other libraries do to the model in between."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from slivertune.core.held_parameters import held_parameters
from slivertune.core.module_hook import ModuleHook
from slivertune.core.outputs import tensors_of
from slivertune.core.torch_internals import version_of
from slivertune.sft.delta_parameters import DeltaParameters
from slivertune.sft.gradient_sync import GradientSync
from slivertune.sft.weight import SparseWeight


class ModelGuard:
    """Looks after an attached model: in the pre-hook of each training forward, at the backward's begin, and in `step`.

    - `requires_grad` is set as SFT needs it; what was changed is no error, and its dense gradient is dropped.
    - A trained tensor that was replaced or cast, and a new parameter that requires a gradient, are errors.
    - Another optimizer that steps the deltas, or holds the trained weights, is an error before it has stepped.

    Costs a walk over the model's modules in each forward; no tensor is read.

    Args:
        model: The model.
        weights: The trained tensors.
        delta_parameters: Holds their deltas.
        optimizer: The one that may step them.
        gradient_sync: Knows whether other ranks train too, unprepared for: DDP's wrapper writes deltas.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[SparseWeight],
        delta_parameters: DeltaParameters,
        optimizer: torch.optim.Optimizer,
        gradient_sync: GradientSync,
    ) -> None:
        self._model = model
        self._gradient_sync = gradient_sync
        self._weights = weights
        self._delta_parameters = delta_parameters
        self._optimizer = weakref.ref(optimizer)
        self._handles: list[RemovableHandle] = []
        self._known: dict[int, tuple[nn.Parameter, bool]] = {}
        self._trained: dict[int, str] = {}
        self._is_whole = True
        self._companion: object = None
        self._versions: list[int] = []

    def put_on(self, companion: object) -> None:
        """Begin, with the model's parameters as they are now.

        Args:
            companion: Kept alive for as long as the model is guarded.
        """
        self._companion = companion
        self._is_whole = all(weight.pretrained.is_whole for weight in self._weights)
        self._trained = {id(weight.target.parameter): weight.name for weight in self._weights}
        trained = {id(weight.target.parameter) for weight in self._weights if weight.merged}
        deltas = [weight.phi for weight in self._weights]
        known = [(each, id(each) in trained) for each in self._model.parameters()]
        known += [(each, True) for each in (*deltas, self._delta_parameters.witness)]
        self._known = {id(each): (each, required) for each, required in known}
        # What SFT itself writes into the deltas leaves their versions alone.
        self._versions = [version_of(delta) for delta in deltas]
        # The model may outlive this, or go with it; optimizers' hooks are global, and would keep it alive for ever.
        alive = weakref.ref(self)

        def before_step(*args: Any) -> None:
            guard = alive()
            if guard is not None:
                guard.before_foreign_step(*args)

        step_hook = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, step_hook.remove)
        self._handles = [
            self._model.register_forward_pre_hook(ModuleHook(self.before_forward)),
            self._model.register_forward_hook(ModuleHook(self.after_forward)),
            step_hook,
        ]

    def take_off(self) -> None:
        """End."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._known, self._trained, self._companion = [], {}, {}, None

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        """See to a training forward."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.check()
            self.freeze()

    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Freeze again when the backward begins, in which checkpointed layers run once more.

        Where a training forward has met nothing that is trained, the user's backward finds an end nevertheless.
        """
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        tensors = [leaf for leaf in tensors_of(output) if leaf.is_floating_point()]
        followed = [leaf for leaf in tensors if leaf.requires_grad]
        for leaf in followed:
            leaf.register_hook(lambda gradient: self.freeze())
        if not followed and module.training:
            for leaf in tensors:
                if leaf.is_leaf and not leaf.is_inference() and not isinstance(leaf, nn.Parameter):
                    leaf.requires_grad_(True)

    def freeze(self) -> None:
        """Let exactly what SFT trains require gradients; what others got meanwhile is dropped."""
        for parameter, required in self._known.values():
            if parameter.requires_grad != required:
                parameter.requires_grad_(required)
                if not required:
                    parameter.grad = None

    def check(self) -> None:
        """Check that the model still has the tensors that SFT was built over.

        Raises:
            RuntimeError: Naming the parameter that was replaced, cast or added, or the deltas that were written.
        """
        for weight, version in zip(self._weights, self._versions, strict=True):
            if version_of(weight.phi) != version:
                self._gradient_sync.communicator.check()
                raise RuntimeError(
                    f"the deltas of {weight.name} were written by something else than SFT, which trains them; they are "
                    "parameters of the model only to be clipped and scaled: call detach() before anything else trains "
                    "the model, and set its weights in place of the deltas"
                )
        missing, added = dict(self._trained), []
        modules = set()
        for module, parameter in held_parameters(self._model):
            modules.add(id(module))
            if id(parameter) in self._known:
                missing.pop(id(parameter), None)
            elif parameter.requires_grad and not isinstance(module, DeltaParameters):
                added.append(parameter)
        if not self._is_whole:
            # FSDP2 puts other tensors in its place for a while, in the same module.
            missing = {i: each.name for i, each in enumerate(self._weights) if id(each.target.module) not in modules}
        for name in missing.values():
            raise RuntimeError(
                f"{name} was replaced after SFT was built, so that the model would not compute with what is trained; "
                "do what replaced it (a new module, resize_token_embeddings, load_state_dict(assign=True), an offload) "
                "before SFT(...), or call detach() first and build a new SFT"
            )
        for weight in self._weights:
            weight.check_tensor()
        for new in added:
            name = next(name for name, each in self._model.named_parameters() if each is new)
            raise RuntimeError(
                f"{name} came into the model after SFT was built and requires a gradient, but SFT does not train it; "
                "add it (an adapter, a new head, larger embeddings) before SFT(..., targets=[...]), or call "
                "requires_grad_(False) on it"
            )

    def check_shards(self) -> None:
        """Check that nobody else has set trained entries of weights that lie in shards.

        Raises:
            RuntimeError: Naming the parameter.
        """
        found = {weight.name: weight.is_changed_in_shards() for weight in self._weights}
        changed = {name: each for name, each in found.items() if each is not None}
        # The device is waited for once.
        if changed and bool(torch.stack(list(changed.values())).any()):
            name = next(name for name, each in changed.items() if each)
            raise RuntimeError(
                f"trained entries of {name} were set by something else than SFT (load_state_dict of the model) after "
                "the ranks had shared the weights out, which SFT can't follow there; put weights in before "
                "slivertune.prepare or initialize, or load a checkpoint of this run, which includes the deltas"
            )

    def before_foreign_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse the step of another optimizer that holds what SFT trains."""
        own = self._optimizer()
        inner: Any = optimizer
        while inner is not None:
            if inner is own:
                return
            inner = getattr(inner, "optimizer", None)
        deltas = {id(weight.phi): weight.name for weight in self._weights} | self._trained
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in deltas:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} would step {deltas[id(parameter)]}, which SFT trains while it is "
                        "attached; call detach() of the SFT (or of what slivertune.attach returned) before anything "
                        "else trains the model, and build that optimizer afterwards"
                    )
