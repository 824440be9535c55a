"""Record reentrant checkpoints (`torch.utils.checkpoint`, `use_reentrant=True`) whose input needs no gradient.

torch records a reentrant checkpoint only if a tensor among its positional arguments requires a gradient, whatever the
parameters inside. Pixels, mel spectrograms and the output of frozen layers require none, so the gradients of all
weights inside would be dropped. Here, the blocks that transformers checkpoints get such an argument. Any other
checkpoint is refused if trained modules run inside it and it is not recorded.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from slivertune.core.checkpointed_blocks import CheckpointedBlocksHandle
from slivertune.core.compiled_blocks import runs_compiled
from slivertune.core.module_hook import ModuleHook
from slivertune.core.outputs import with_tensors_replaced
from slivertune.core.torch_internals import CODE_OF_APPLY, apply_function, compiled_call_of
from slivertune.core.transformers_internals import checkpointing_of


def is_trainable(module: nn.Module) -> bool:
    """Return whether any parameter of a module requires a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters())


class ReentrantBlocks(CheckpointedBlocksHandle):
    """Records the reentrant checkpoint of every block that trains, whatever its input.

    A block whose input requires no gradient is given a scalar that does. Values and gradients do not change, no
    gradient of the input is computed, and blocks that do not train stay unrecorded. Tensors that a block is given by
    keyword or in a nest, and tensors that it returns in a nest, get their gradients as well.

    Args:
        model: Any model. `prepare` follows checkpointing that is switched on later.
        trains: Function that tells whether a block has anything that is trained.
    """

    is_innermost: ClassVar[bool] = True  # only forwards that torch checkpoints
    needs_blocks: ClassVar[bool] = False
    refusal_to_copy = "a recorder of reentrant checkpoints belongs to one model. A copy of the model has none"

    def __init__(self, model: nn.Module, trains: Callable[[nn.Module], bool] = is_trainable) -> None:
        super().__init__(model)
        self._trains = trains
        self._undo.append(self._take_off)

    def prepare(self) -> None:
        """Stand in front of the blocks' reentrant checkpointing. Called before each training forward."""
        self._put()

    def wants(self, function: Callable[..., Any]) -> bool:
        """Return whether a function checkpoints in the reentrant way."""
        return is_reentrant(function)

    def run(self, own: Callable[..., Any], layer: nn.Module, place: int, forward: Any, args: tuple[Any, ...]) -> Any:
        """Checkpoint a forward so that it is recorded if anything in or below it trains."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return own(forward, *args)
        by_position = {id(each): each for each in args if isinstance(each, torch.Tensor)}
        nest = _tensors_of((args, dict(getattr(forward, "keywords", {}))))
        nested = [each for key, each in nest.items() if each.requires_grad and key not in by_position]
        anchors: list[torch.Tensor] = []
        if not nested and not any(each.requires_grad for each in by_position.values()):
            if not self._trains(layer):
                return forward(*args)  # nothing is recorded
            anchors = [torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)]
        call = _PositionalCall(forward, [id(each) for each in args], [id(each) for each in nested])
        results = own(call, *args, *nested, *anchors)
        after = _tensors_of((args, dict(getattr(forward, "keywords", {}))))
        if any(key not in nest and each.is_floating_point() for key, each in after.items()):
            raise RuntimeError(
                f"{type(layer).__name__} passes tensors in a container among its arguments (as keys and values that "
                "blocks share), and reentrant checkpointing loses their gradient. Pass "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        return call.take_output((results,) if isinstance(results, torch.Tensor) else results)


class _PositionalCall:
    """Passes all tensors that require a gradient to a block's forward by position, and returns a tuple.

    The graph holds this object, which therefore holds no tensor beyond the forward's own keywords.

    Args:
        forward: The block's forward, with its keyword arguments bound (`functools.partial`).
        args: Identities of its positional arguments.
        nested: Identities of the tensors that follow them, which lie in keywords and nests. An anchor that requires a
            gradient may come last.
    """

    def __init__(self, forward: Callable[..., Any], args: Sequence[int], nested: Sequence[int]) -> None:
        self._forward, self._args, self._nested = forward, args, nested
        self._output: Any = None
        self._is_running = True

    def __call__(self, *given: Any) -> tuple[torch.Tensor, ...]:
        """Run the forward, now and again in the backward, on the tensors that torch passes."""
        place = dict(zip((*self._args, *self._nested), given, strict=False))

        def replaced(nest: Any) -> Any:
            return with_tensors_replaced(nest, lambda tensor: place.get(id(tensor), tensor))

        args = [each if isinstance(each, torch.Tensor) else replaced(each) for each in given[: len(self._args)]]
        # A partial function takes these keywords in place of its own.
        output = self._forward(*args, **replaced(dict(getattr(self._forward, "keywords", {}))))
        if self._is_running:
            self._output = output
        results = tuple(_tensors_of(output).values())
        anchors = given[len(self._args) + len(self._nested) :]
        # If a block used none of its parameters, torch finds no tensor from which to start the backward.
        if anchors and torch.is_grad_enabled() and not any(each.requires_grad for each in results):
            results = tuple(_anchored(each, anchors[0]) for each in results)
        return results

    def take_output(self, results: Iterable[torch.Tensor]) -> Any:
        """Return the block's output, with the tensors that torch has recorded.

        Args:
            results: The recorded tensors.
        """
        output, self._output, self._is_running = self._output, None, False
        recorded = dict(zip(_tensors_of(output), results, strict=True))
        return with_tensors_replaced(output, lambda tensor: recorded[id(tensor)])


class RecordingCheck:
    """Refuses a training forward in which a module runs inside of a checkpoint that torch does not record.

    For one forward, it hooks the modules that it is told to watch. It also looks for their parameters in calls of
    torch's functions, since a checkpointed method may call no module. Compiled modules and all below them are not
    watched, since a hook would become part of the graph, and a model with any of them not for calls of functions.
    """

    def __init__(self) -> None:
        self._watching = ExitStack()

    def begin(self, model: nn.Module, modules: Mapping[nn.Module, str]) -> None:
        """Watch modules until `end`.

        Args:
            model: Model that holds them.
            modules: Modules that hold trained parameters, each with the name of one of these.
        """
        self.end()
        if not modules:
            return
        compiled = [each for each in model.modules() if runs_compiled(each) or compiled_call_of(each) is not None]
        unhooked = {below for each in compiled for below in each.modules()}
        for module, name in modules.items():
            if module not in unhooked:
                hook = ModuleHook(_checks_recording(name))
                self._watching.callback(module.register_forward_pre_hook(hook).remove)
        if compiled:
            return
        # Bypass ZeRO-3's own dictionary, which gathers each requested parameter in a forward.
        owned = ((each, name) for module, name in modules.items() for each in dict.values(module._parameters))
        trained = {id(each): name for each, name in owned if each is not None and each.requires_grad}
        self._watching.enter_context(_ParameterUses(trained))

    def end(self) -> None:
        """Take the hooks off."""
        self._watching.close()


class _ParameterUses(TorchFunctionMode):
    """Checks each call of torch that is given a watched parameter while gradients are disabled.

    Args:
        names: Names of the parameters, by identity.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function after the check. Reading an attribute of a tensor (`dtype`) is no use of it."""
        if not torch.is_grad_enabled() and getattr(func, "__name__", "") != "__get__":
            for given in (*args, *(kwargs or {}).values()):
                for each in given if isinstance(given, (list, tuple)) else (given,):
                    if id(each) in self._names:
                        check_recorded(self._names[id(each)])
        return func(*args, **(kwargs or {}))


def check_recorded(name: str) -> None:
    """Refuse to run a trained module inside of an unrecorded autograd function, such as a reentrant checkpoint.

    Costs a walk over the Python stack if gradients are disabled, else nothing.

    Args:
        name: A trained parameter of the module.

    Raises:
        RuntimeError: If the outermost autograd function is unrecorded. The message names the parameter and the way out.
    """
    if torch.is_grad_enabled():
        return
    function, args = _outermost_function()
    if function is not None and not any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
        raise RuntimeError(
            f"{name} is trained, but runs under reentrant checkpointing ({function.__name__}), which loses its "
            "gradient: no tensor among the positional arguments of the checkpoint requires a gradient. Call "
            "torch.utils.checkpoint.checkpoint with use_reentrant=False"
        )


def is_reentrant(function: Any) -> bool:
    """Return whether a function checkpoints a block in the reentrant way, which is torch's own default.

    Args:
        function: The block's function, as transformers sets it. None if the block was never checkpointed.
    """
    return function is not None and getattr(function, "keywords", {}).get("use_reentrant") is not False


def has_other_reentrant(model: nn.Module) -> bool:
    """Return whether a model calls reentrant checkpointing itself, beside the blocks that transformers checkpoints.

    Args:
        model: A model of transformers, or a part of one.
    """
    switched_on = {
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False) and is_reentrant(checkpointing_of(module))
    }
    blocks = {module for module in switched_on if isinstance(module, GradientCheckpointingLayer)}
    return any(blocks.isdisjoint(module.modules()) for module in switched_on - blocks)


def _outermost_function() -> tuple[type | None, Sequence[Any]]:
    """Return the outermost autograd function whose forward runs now, and its positional arguments. None without any."""
    frame: FrameType | None = inspect.currentframe()
    function: type | None = None
    args: Sequence[Any] = ()
    while frame is not None:
        # To read the locals of a frame keeps their tensors alive until it returns. These live as long by themselves.
        if frame.f_code is CODE_OF_APPLY:
            function, args = frame.f_locals["cls"], frame.f_locals["args"]
        frame = frame.f_back
    return function, args


def _checks_recording(name: str) -> Callable[..., None]:
    return lambda *_: check_recorded(name)


def _tensors_of(nest: Any) -> dict[int, torch.Tensor]:
    """Collect the tensors of a nest by identity, each once."""
    found: dict[int, torch.Tensor] = {}
    with_tensors_replaced(nest, lambda tensor: found.setdefault(id(tensor), tensor))
    return found


def _anchored(tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    is_differentiable = tensor.is_floating_point() or tensor.is_complex()
    return apply_function(_Anchor, tensor, anchor) if is_differentiable else tensor


class _Anchor(torch.autograd.Function):
    """The identity, recorded although its tensor requires no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None
