"""Hooks of HiFT on a model: they freeze all but the active group, watch the backward, and check the model.

With one group free, a batch may not reach it at all: an unused pooler, a layer that LayerDrop left out, the tower of an
input that this batch does not have. Then no output of the model requires a gradient, and `loss.backward()` would raise.
So tensors that the outermost call of the model returns without a gradient pass through an *anchor*, an identity whose
backward only reports that it ran. Tensors that require a gradient stay as they are, and get a hook.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slivertune.core.anchor import anchor
from slivertune.core.foreign_steps import forget_steps, refuse_step_of_other, watch_steps
from slivertune.core.layers import Layer
from slivertune.core.module_hook import ModuleHook
from slivertune.core.outputs import tensors_of, with_tensors_replaced
from slivertune.core.parameters import check_form, held_parameters, owner_of, settle_requires_grad, whole_shape
from slivertune.core.reentrant import RecordingCheck, ReentrantBlocks, has_other_reentrant
from slivertune.core.torch_internals import (
    NO_BACKWARD,
    at_end_of_backward,
    compiled_call_of,
    is_called,
    is_without_data,
    running_backward,
    version_of,
)
from slivertune.hift.chunk import Weight


class ModelHooks:
    """The hooks, from `attach` to `release`. They do not hold the optimizer, which the model must not keep alive.

    Args:
        model: Model to hook.
        layers: Layers of the model. A module that holds more than a whole layer may be called alone
            (`get_text_features`), so it is watched, too, if its call is the outermost.
        weights: Trained weights. The model holds the parameters that they call `trained`.
        listeners: Functions to call when the backward of an outermost forward begins, before anything is recomputed.
            Their callbacks at the end of the backward run before the hooks look for gradients.
        on_forward: Function to call when an outermost forward begins, with its arguments if it records a graph, else
            with None.
        on_forward_end: Function to call when an outermost forward has ended, with whether it had no error.
        on_late_backward: Function to call when a backward begins whose forward was made in the turn of another group.
        on_lack_of_memory: Function to call if a forward ran out of device memory, or the last backward did not end.
        checks_model: Whether each outermost forward that records a graph begins with `check`.
        may_be_scaled: Whether a GradScaler may unscale the gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        weights: Iterable[Weight],
        listeners: Sequence[Callable[[], None]] = (),
        *,
        on_forward: Callable[[Any], None] = lambda inputs: None,
        on_forward_end: Callable[[bool], None] = lambda has_succeeded: None,
        on_late_backward: Callable[[], None] = lambda: None,
        on_lack_of_memory: Callable[[], None] = lambda: None,
        checks_model: bool = True,
        may_be_scaled: bool,
    ) -> None:
        self.model = model
        """Hooked model."""
        self.checks_model = checks_model
        """Whether forwards begin with `check`."""
        self._layers = layers
        self._listeners = listeners
        self._trained = {id(weight.trained): (weight.name, weight.trained) for weight in weights}
        self._forms = [(each.dtype, whole_shape(each)) for _, each in self._trained.values()]
        # By identity, weakly: a parameter that the user replaces must not stay in memory for this.
        self._known = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self._of_the_user = {id(each) for each in model.parameters() if each.requires_grad} - self._trained.keys()
        self._handles: list[RemovableHandle] = []
        self._gradient_hooks: list[RemovableHandle] = []
        self._active: dict[int, nn.Parameter] = {}
        self._free: set[int] = set()
        """Parameters that require a gradient, by `id`: those of the active group and those that step beside them."""
        self._on_forward = on_forward
        self._on_forward_end = on_forward_end
        self._on_late_backward = on_late_backward
        self._on_lack_of_memory = on_lack_of_memory
        self._may_be_scaled = may_be_scaled
        self._ran = self._reached = self._runs_backward = False
        self._arrived: weakref.ref[torch.Tensor] | None = None
        """Gradient that arrived last in a backward."""
        self._task = -1
        self._witness: nn.Parameter | None = None
        self._zeros: torch.Tensor | None = None
        self._outermost: nn.Module | None = None
        self._thread = 0
        """Thread that runs the outermost forward."""
        self._anchor = anchor(self._begin_backward)
        self._has_warned_of_compilation = False
        self._reentrant: ReentrantBlocks
        """Set by `attach`."""
        self._is_stepping = False
        self._recording: RecordingCheck | None = None
        """Check of the running forward. None if it is not watched."""
        self._reached_now: set[int] = set()
        self._not_reached = set(self._trained)
        """Parameters, by `id`, without a gradient in the last backward of their turn, or without any gradient yet."""
        self._truncated: list[Any] = []

    def attach(self) -> None:
        """Freeze all trained parameters until their turn, and hook the model."""
        if compiled_call_of(self.model) is not None:
            self._warn_of_compilation()
        for _, parameter in self._trained.values():
            parameter.requires_grad_(False)
        self._reentrant = ReentrantBlocks(self.model)
        self._handles = [self.model.register_forward_pre_hook(ModuleHook(self._truncate_backward))]
        for module in _entry_modules(self.model, self._layers):
            self._handles += [
                module.register_forward_pre_hook(ModuleHook(self._before_forward), with_kwargs=True),
                module.register_forward_hook(ModuleHook(self._after_forward), always_call=True),
            ]
        watch_steps(self)

    def release(self) -> None:
        """Unfreeze every trained parameter, and remove the hooks from the model. Later calls do nothing."""
        if not self._handles:
            return
        forget_steps(self)
        for handle in (*self._handles, *self._gradient_hooks):
            handle.remove()
        self._end_watching()
        self._reentrant.remove()
        while self._truncated:
            self._truncated.pop().enable_input_require_grads()
        self._handles, self._gradient_hooks = [], []
        for _, parameter in self._trained.values():
            parameter.requires_grad_(True)
        self._outermost = None
        self.end_update()
        self._active, self._free = {}, set()

    def activate(
        self,
        weights: Iterable[Weight],
        on_gradient: Callable[[torch.Tensor], None],
        beside: Sequence[Weight] = (),
    ) -> None:
        """Begin the turn of a group.

        Args:
            weights: Weights of the group.
            on_gradient: Function to call with each parameter whose gradient is complete.
            beside: Other weights that have gradients. An update needs none of them.
        """
        self._active = {id(weight.trained): weight.trained for weight in weights}
        self._free = self._active.keys() | {id(weight.trained) for weight in beside}
        self.end_update()

        def note_gradient(parameter: torch.Tensor) -> None:
            self._reached = True
            if parameter is self._witness:
                self._witness = None  # another backward has added a gradient to its zeros
            self._reached_now.add(id(parameter))
            arrived = parameter.grad
            on_gradient(parameter)
            # An offloaded gradient may have replaced it.
            arrived = arrived if parameter.grad is None else parameter.grad
            self._arrived = weakref.ref(arrived) if arrived is not None else None

        for hook in self._gradient_hooks:
            hook.remove()
        for key, (_, parameter) in self._trained.items():
            parameter.requires_grad_(key in self._free)
            if key not in self._active:
                parameter.grad = None
        self._gradient_hooks = [
            parameter.register_post_accumulate_grad_hook(note_gradient) for parameter in self._active.values()
        ]
        self._gradient_hooks += [weight.trained.register_post_accumulate_grad_hook(on_gradient) for weight in beside]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Mark steps of trained parameters inside the context as HiFT's own."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def refuse_foreign_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse the step of another optimizer that holds trained parameters: no turn would follow it.

        Args:
            optimizer: Optimizer that is about to step.
        """
        if not self._is_stepping:
            own = next((owner_of(parameter) for _, parameter in self._trained.values()), None)
            refuse_step_of_other(
                optimizer, own, lambda: {key: name for key, (name, _) in self._trained.items()}, "HiFT"
            )

    def settle(self) -> None:
        """Restore the parameters that others have frozen or unfrozen, as an adapter does with its own when switched on.

        Gradients that arrived in frozen parameters are dropped, so that no norm counts them.
        """
        settle_requires_grad((parameter, key in self._free) for key, (_, parameter) in self._trained.items())

    def has_brought_gradient(self) -> bool:
        """Return whether a gradient of the active group came from a backward, and was not set by hand."""
        arrived = self._arrived() if self._arrived is not None else None
        return arrived is not None and any(parameter.grad is arrived for parameter in self._active.values())

    def has_gradient(self) -> bool:
        """Return whether a parameter of the active group has a gradient other than the zeros for a GradScaler."""
        return any(each.grad is not None and not self._is_zeros(each) for each in self._active.values())

    def _is_zeros(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient is the zeros for a GradScaler, which others may replace or add to."""
        zeros = self._zeros
        if parameter is not self._witness or zeros is None or parameter.grad is not zeros:
            return False
        return version_of(zeros) == 0 or not bool(zeros.any())  # a GradScaler writes to them, too

    def end_update(self) -> bool:
        """End an update, stepped or given up. Return whether a backward has run, and none reached the group."""
        missed = self._ran and not self._reached and not self.has_gradient()  # which may be set by hand
        if self._ran:
            self._not_reached = (self._not_reached | self._active.keys()) - self._reached_now
        self._reached_now.clear()
        self._ran = self._reached = False
        self._drop_witness()
        return missed

    def check(self) -> None:
        """Check, by a walk over its modules, that the model still holds the trained parameters. No tensor is read.

        Raises:
            RuntimeError: If a trained parameter was replaced, cast, resized or offloaded, or a new one requires a
                gradient; naming it, the usual causes, and the way out.
        """
        present: set[int] = set()
        others: list[nn.Parameter] = []
        for _, parameter in held_parameters(self.model):
            present.add(id(parameter))
            if parameter.requires_grad and id(parameter) not in self._trained:
                others.append(parameter)
        for (key, (name, parameter)), (dtype, shape) in zip(self._trained.items(), self._forms, strict=True):
            if key not in present:
                raise RuntimeError(
                    f"{name}, which HiFT trains, is no longer in the model: it was replaced after HiFT was "
                    "built (by resize_token_embeddings, a new head, load_state_dict(assign=True), offloading, or "
                    f"the like), and the new tensor would never be trained. Do that before HiFT is built, or call "
                    "detach() and build a new HiFT"
                )
            check_form("HiFT", name, parameter, dtype, shape)
            if parameter.device.type == "meta":
                raise RuntimeError(f"{name} is on meta, where nothing can be trained. Load its values first")
        if others:
            self._judge(others)

    def free_successors(self) -> None:
        """Unfreeze the successors of trained parameters, which were made like them, maybe while they were frozen."""
        trained = dict(self._trained.values())
        for name, successor in self.model.named_parameters():
            if trained.get(name, successor) is not successor and successor.is_floating_point():
                successor.requires_grad_(True)

    def _judge(self, others: Iterable[nn.Parameter]) -> None:
        new, unfrozen = [], []
        for parameter in others:
            known = self._known.get(id(parameter))
            if known is None or known() is not parameter:
                new.append(parameter)
            elif id(parameter) not in self._of_the_user:
                unfrozen.append(parameter)
        if new:
            raise RuntimeError(
                f"{self._names(new)} came into the model after HiFT was built and would never be trained (PEFT, new "
                "embeddings or heads). Add it before HiFT is built (call detach() on an older one first), or freeze it"
            )
        if unfrozen:
            self._of_the_user.update(map(id, unfrozen))  # said once
            warnings.warn(
                f"{self._names(unfrozen)} was frozen when HiFT was built and requires a gradient now: HiFT does not "
                "train it, though clip_grad_norm_ counts its gradient. Freeze it again, unfreeze it before HiFT is "
                "built, or train it by another optimizer",
                UserWarning,
                stacklevel=5,
            )

    def _names(self, parameters: Iterable[torch.Tensor]) -> str:
        wanted = set(parameters)
        names = [name for name, parameter in self.model.named_parameters() if parameter in wanted]
        return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]

    def _before_forward(self, module: nn.Module, inputs: Any, named_inputs: Any) -> None:
        thread = threading.get_ident()
        # After Ctrl-C torch does not call `_after_forward`.
        if self._outermost is not None and is_called(self._outermost, self._thread, beside=module):
            return
        self._outermost, self._thread = module, thread
        if not torch.is_grad_enabled():
            self._on_forward(None)
            return
        if torch.compiler.is_compiling():
            self._warn_of_compilation()
        if self._runs_backward and running_backward() == NO_BACKWARD:
            self._runs_backward = False
            self._on_lack_of_memory()
        self._on_forward((inputs, named_inputs))
        self._drop_witness()
        if self._reached and not self.has_gradient():
            self.end_update()
        if self.checks_model:
            self.check()
        self.settle()
        if not torch.compiler.is_compiling():
            self._reentrant.prepare()
            self._watch_recording()

    def _watch_recording(self) -> None:
        """Watch the modules whose parameters are not known to get a gradient."""
        watched = {key: self._trained[key][0] for key in self._active if key in self._not_reached}
        # A memory plan runs one update, and plans updates without these hooks.
        if watched and not is_without_data():
            held = held_parameters(self.model)
            modules = {module: watched[id(each)] for module, each in held if id(each) in watched}
            self._end_watching()
            self._recording = RecordingCheck()
            self._recording.begin(self.model, modules)

    def _end_watching(self) -> None:
        if self._recording is not None:
            self._recording.end()
            self._recording = None

    @torch.compiler.disable(reason="the warning is for the user")  # type: ignore[untyped-decorator]
    def _warn_of_compilation(self) -> None:
        if self._has_warned_of_compilation:
            return
        self._has_warned_of_compilation = True
        warnings.warn(
            f"{type(self.model).__name__} is compiled as a whole, and has another graph in every "
            "turn of HiFT. After torch's limit of graphs it runs eagerly. Compile its blocks instead, which share a "
            "few graphs: slivertune.compile_blocks(model) in place of torch.compile(model) or model.compile()",
            UserWarning,
            stacklevel=2,
        )

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self._outermost is not module:
            return None
        self._outermost = None
        self._end_watching()
        if isinstance(sys.exception(), torch.OutOfMemoryError):
            self._on_lack_of_memory()
        self._on_forward_end(sys.exception() is None)
        if output is None or not torch.is_grad_enabled():
            return None
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._begin_backward_of, self._active.keys()))
        anchored = with_tensors_replaced(output, self._anchor)
        return None if anchored is output else anchored

    def _begin_backward_of(self, group: Set[int], gradient: torch.Tensor) -> None:
        if group != self._active.keys():
            self._on_late_backward()
        self._begin_backward()

    def _begin_backward(self, gradient: torch.Tensor | None = None) -> None:
        task = running_backward()
        if task != self._task:
            self._task, self._runs_backward = task, True
            self._drop_witness()
            self.settle()
            for listener in self._listeners:
                listener()
            # Called when the whole backward is over, unless it has failed.
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        """Note that the backward has run."""
        self._ran, self._runs_backward = True, False
        if self._may_be_scaled and not self._reached:
            # After the other callbacks at that time, in which FSDP2 sets its gradients.
            at_end_of_backward(self._give_zeros)

    def _give_zeros(self) -> None:
        """Give a GradScaler, which fails without any gradient, zeros of the smallest parameter.

        Nothing reveals a scaler before it looks for gradients, whatever the dtype of the forward.
        """
        if self._active and not self._reached and self._witness is None and not self.has_gradient():
            self._witness = min(self._active.values(), key=lambda parameter: parameter.numel())
            self._witness.grad = self._zeros = torch.zeros_like(self._witness)

    def _drop_witness(self) -> None:
        if self._witness is not None:
            if self._is_zeros(self._witness):
                self._witness.grad = None
            self._witness = self._zeros = None

    def _truncate_backward(self, model: nn.Module, inputs: Any) -> None:
        """Undo `enable_input_require_grads`, which transformers 5 calls along with checkpointing.

        If the embedding's output requires a gradient, the backward runs through every frozen block down to it. A model
        that calls reentrant checkpointing by itself needs this, and keeps it.
        """
        for module in model.modules():
            if getattr(module, "_require_grads_hooks", None) and not has_other_reentrant(module):
                module.disable_input_require_grads()  # type: ignore[operator]
                if module not in self._truncated:
                    self._truncated.append(module)


def _entry_modules(model: nn.Module, layers: Iterable[Layer]) -> list[nn.Module]:
    """Return the model and its modules with more than a whole layer, which a training loop may call alone."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    first_of = {layer.parameter_names[0]: frozenset(layer.parameter_names) for layer in layers}
    found = [model]
    for module in model.modules():
        if module is model or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        own = {name_of[id(parameter)] for parameter in module.parameters()}
        if any(first in own and len(own) > len(names) and names <= own for first, names in first_of.items()):
            found.append(module)
    return found
