"""Undocumented interfaces of torch that the library relies on, the same in torch 2.12 and 2.13.

All other modules reach these through this file. `RELIED_ON` lists the place and the use of each, so that a test can
name any that has moved.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._triton import has_triton
from torch.utils.flop_counter import flop_registry

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "tree_map",
]

RELIED_ON: Mapping[str, str] = {
    "torch._C._current_graph_task_id": "tells one backward pass from another",
    "torch.autograd.Variable._execution_engine.queue_callback": "calls at the end of a backward pass",
    "torch._C._autograd._top_saved_tensors_default_hooks": "leaves other saved tensors to whoever keeps them",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "ends hooks that Ctrl-C has left",
    "torch._C._autograd._push_saved_tensors_default_hooks": "leaves hooks that began after them",
    "torch.autograd.Function.apply.__func__.__code__": "finds the arguments of an autograd function that runs",
    "torch._C._get_dispatch_mode": "tells whether tensors have no data",
    "torch._C._TorchDispatchModeKey.FAKE": "tells whether tensors have no data",
    "torch._subclasses.fake_tensor.FakeTensor": "tells tensors without data",
    "torch._subclasses.fake_tensor.FakeTensorMode": "runs a step on tensors without data",
    "torch._subclasses.fake_tensor.FakeTensorMode.dispatch": "answers operators on inputs that were met before",
    "torch._C._DisableTorchDispatch": "makes an operator's result without running it",
    "torch._C._set_warn_deprecated_on_mutable_data_ptr": "makes a tensor without data as its constructor does",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "says that a step needs values",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "says that a step needs values",
    "torch.utils._python_dispatch.TorchDispatchMode": "sees every operator",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "takes tensor subclasses apart",
    "torch.utils._python_dispatch._disable_current_modes": "computes with data among tensors without",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "tells who else sees operators",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo": "calls a mode without its guards",
    "torch.utils.flop_counter.flop_registry": "counts an operator's floating-point operations",
    "torch.utils._pytree.tree_leaves": "finds the tensors among an operator's arguments",
    "torch.utils._triton.has_triton": "tells whether torch compiles kernels for a GPU",
    "torch.utils._pytree.tree_map": "replaces the tensors among an operator's arguments",
    "torch.Tensor._make_wrapper_subclass": "makes a tensor that lies elsewhere",
    "torch.Tensor._make_subclass": "makes a tensor that is read when it is needed, or has no data",
    "torch._C.DisableTorchFunctionSubclass": "asks such a tensor for what it knows of itself",
    "torch._dynamo.config.recompile_limit": "lets each instance of an optimizer compile its step",
    "torch._dynamo.config.accumulated_recompile_limit": "lets each instance of an optimizer compile its step",
    "torch._dynamo.config.patch": "lets each instance of an optimizer compile its step",
    "torch._foreach_norm": "the norm as clip_grad_norm_ computes it on a GPU",
    "torch.ops.aten._local_scalar_dense.default": "the operator that reads a tensor's value",
    "torch.ops.prim.device.default": "asks where a tensor without data says it lies",
    "torch.ops.aten._unsafe_view.default": "the view that torch does not call one",
    "torch.ops.aten._unique2.default": "the operator whose result's size depends on values",
    "torch.ops.aten._scaled_dot_product_attention_math.default": "attention as plain products",
    "torch._grouped_mm": "the experts' products, which torch.nn.functional.grouped_mm calls",
    "torch.ops.aten.add_.Tensor._schema": "tells which arguments an operator writes",
    "torch.Tensor._version": "counts the writes into a tensor",
    "torch.Tensor._base": "finds the tensor of which another is a view",
    "torch.UntypedStorage._cdata": "names a storage",
    "torch.nn.Module()._modules": "the children of a module, None and repetitions included",
    "torch.nn.Module()._buffers": "replaces a buffer",
    "torch.nn.Module()._compiled_call_impl": "tells a module that was compiled in place",
    "torch.nn.Module._call_impl.__code__": "tells whether a module is being called",
    "torch.nn.modules.conv._ConvNd": "all convolutions",
    "torch.nn.modules.batchnorm._NormBase": "all norms over a batch or an instance",
    "torch.nn.modules.padding._ConstantPadNd": "all paddings by a constant",
    "torch._dynamo.eval_frame._is_in_optimized_module": "tells a forward inside of a compiled module",
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model": "leaves parked weights to "
    "each rank",
    "torch.distributed.distributed_c10d._get_default_group": "the process group of a run",
    "torch.distributed.distributed_c10d._get_default_store": "the store that the ranks share",
    "torch.distributed.distributed_c10d._get_default_timeout": "tells a timeout that nobody has set",
    "torch.distributed.distributed_c10d._set_pg_timeout": "lets all process groups keep the user's timeout",
    "torch.distributed.distributed_c10d._world.pg_map": "all process groups",
    "torch.distributed.ProcessGroup._device_types": "the devices whose tensors a process group takes, and its timeout",
    "torch.distributed.ProcessGroup._get_backend": "the timeout of a process group",
}
"""Use of each interface, by dotted name. `Class()` is an instance."""

Tensor = TypeVar("Tensor", bound=torch.Tensor)
NO_BACKWARD = -1
"""Number that stands for no backward pass."""
READS_A_VALUE = torch.ops.aten._local_scalar_dense.default
"""Operator of `tensor.item()`."""
FINDS_DISTINCT_VALUES = torch.ops.aten._unique2.default
"""Operator of `tensor.unique()`."""
ASKS_FOR_DEVICE = torch.ops.prim.device.default
"""Operator of `tensor.device`, for tensors that say they lie elsewhere."""
UNNAMED_VIEW = torch.ops.aten._unsafe_view.default
"""Operator that returns a view, though its schema says that it does not."""
GROUPED_PRODUCT = torch._grouped_mm
"""Function behind `torch.nn.functional.grouped_mm`. A function mode sees this one, and not that one."""
FLOP_FORMULAS: Mapping[Any, Callable[..., int]] = flop_registry
"""Formulas by operator (without overload): floating-point operations from its arguments and `out_val`, its result."""
Convolution = nn.modules.conv._ConvNd
"""Base class of all convolutions."""
CODE_OF_APPLY: Any = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
"""Code of `torch.autograd.Function.apply`, whose locals `cls` and `args` are the function and its arguments."""
_CODE_OF_CALL = nn.Module._call_impl.__code__
BatchNorm = nn.modules.batchnorm._NormBase
"""Base class of all norms over a batch or over a whole instance, whose statistics run over tokens."""
ConstantPad = nn.modules.padding._ConstantPadNd
"""Base class of all paddings by a constant, which shift tokens when they crop."""


def running_backward() -> int:
    """Return the number of the backward pass that this thread runs a part of. `NO_BACKWARD` outside of any."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward pass is over, unless it fails. Only valid inside of one.

    Functions are called in the order in which they were given, after the last gradient is accumulated.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def saved_tensors_hooks_now() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the functions that pack and unpack saved tensors now, as checkpointing does. None if there are none."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else (hooks[0], hooks[1])


def end_saved_tensors_hooks(hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
    """End a context of saved tensors' hooks, and leave those that began inside of it. Does nothing if it has ended."""
    inside = []
    while (top := saved_tensors_hooks_now()) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if top[0] is hooks.pack_hook:
            break
        inside.append(top)
    for pack, unpack in reversed(inside):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def is_without_data() -> bool:
    """Return whether tensors that are made now have sizes but no data."""
    return running_fake_mode() is not None


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Let operators compute as if no mode were entered."""
    with _disable_current_modes():
        yield


def apply_function(function: Any, *args: Any) -> torch.Tensor:
    """Apply an autograd function with one result."""
    result: torch.Tensor = function.apply(*args)
    return result


def plain_attention(*tensors: Any, **options: Any) -> Any:
    """Compute attention by matrix products and a softmax. Arguments and results are the operator's."""
    return torch.ops.aten._scaled_dot_product_attention_math(*tensors, **options)


def arguments_of(operator: Any) -> list[tuple[str, bool]]:
    """List an operator's arguments in their order: the name of each, and whether the operator writes it.

    Args:
        operator: The operator, as a dispatch mode gets it.
    """
    return [
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in operator._schema.arguments
    ]


def can_compile_kernels(device: torch.device) -> bool:
    """Return whether torch compiles kernels for a device, that is, whether it is a CUDA device that Triton supports.

    Args:
        device: The device.
    """
    return device.type == "cuda" and bool(has_triton())


def is_compilation_disabled() -> bool:
    """Return whether the environment disables torch.compile, by TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE."""
    return bool(torch._dynamo.config.disable) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def compiling_as_usual() -> AbstractContextManager[None]:
    """Compile and run compiled functions whatever stance (`torch.compiler.set_stance`) is set outside.

    A stance can't be set in code that is being compiled.
    """
    return nullcontext() if torch.compiler.is_compiling() else torch.compiler.set_stance("default")


def with_recompile_limit(limit: int) -> AbstractContextManager[None]:
    """Let torch compile a function up to this often before it runs it uncompiled, if its own limit is lower.

    Args:
        limit: Number of compilations. torch's own limits are 8 at a time, and 256 in all.
    """
    config: Any = torch._dynamo.config
    names = ("recompile_limit", "accumulated_recompile_limit")
    return config.patch({name: max(limit, getattr(config, name)) for name in names})  # type: ignore[no-any-return]


def tensor_without_memory(kind: type[Tensor], like: torch.Tensor) -> Tensor:
    """Make a tensor of a subclass, in the form of another one, that has no memory of its own."""
    made: Tensor = torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )
    return made


def multi_tensor_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the 2-norm by the kernel that `clip_grad_norm_` takes on a GPU, which may round it differently."""
    return torch._foreach_norm([tensor], 2.0)[0]


_examples: dict[torch.device, dict[str, Any]] = {}
"""Attributes of a tensor without data, by its device."""


def fake_tensor(
    mode: FakeTensorMode,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    storage: torch.UntypedStorage | None = None,
    offset: int = 0,
) -> FakeTensor:
    """Make a tensor without data, several times faster than an operator does.

    Args:
        mode: The entered mode.
        shape: Shape of the tensor.
        stride: Stride in elements.
        dtype: Dtype of the tensor.
        device: Device that the tensor reports.
        storage: Storage of another tensor without data, of which it is a view. None for its own.
        offset: Offset in that storage, in elements.
    """
    with torch._C._DisableTorchDispatch():
        if storage is None:
            form = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            form = torch.empty((), dtype=dtype, device="meta")
            form.set_(storage, offset, shape, stride)
    example = _examples.get(device)
    if example is None:
        attributes = vars(FakeTensor(mode, form, device))
        _examples[device] = {name: value for name, value in attributes.items() if name != "fake_mode"}
        return fake_tensor(mode, shape, stride, dtype, device, storage=storage, offset=offset)
    # As its constructor does, without the checks of its arguments.
    made: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, form, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    vars(made).update(example, fake_mode=mode)
    return made


def running_fake_mode() -> FakeTensorMode | None:
    """Return the mode in which tensors have no data, or None outside of one."""
    mode: FakeTensorMode | None = _get_dispatch_mode(_TorchDispatchModeKey.FAKE)
    return mode


def running_modes() -> list[TorchDispatchMode]:
    """Return the other modes that see operators, the one that sees them last first."""
    modes: list[TorchDispatchMode] = _get_current_dispatch_mode_stack()
    return [mode for mode in modes if not isinstance(mode, FakeTensorMode)]


def is_wrapper_type(kind: type) -> bool:
    """Return True for tensor subclasses other than FakeTensor and Parameter, which compute in their own way."""
    return not issubclass(kind, (FakeTensor, nn.Parameter)) and kind is not torch.Tensor


def viewed_by(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which a tensor is a view, or the tensor itself if it is none.

    Args:
        tensor: Any tensor.
    """
    return tensor if tensor._base is None else tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor, or to another view of its memory. It is 0 for an inference tensor."""
    return 0 if tensor.is_inference() else tensor._version


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that a live storage shares with no other."""
    return int(storage._cdata)


_TensorSubclass = TypeVar("_TensorSubclass", bound=torch.Tensor)


def make_subclass(subclass: type[_TensorSubclass], tensor: torch.Tensor) -> _TensorSubclass:
    """Make a tensor of a subclass over another tensor's memory."""
    made: _TensorSubclass = torch.Tensor._make_subclass(subclass, tensor)
    return made


def plain_tensor_functions() -> Any:
    """Return a context in which tensor subclasses compute as plain tensors, past their `__torch_function__`."""
    return torch._C.DisableTorchFunctionSubclass()


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children by name, None and repetitions included, as the live dictionary."""
    return module._modules


def compiled_call_of(module: nn.Module) -> Any:
    """Return the compiled function that `module.compile()` sets. None if the module was not compiled in place."""
    return module._compiled_call_impl


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled: in place, by another module around it, or by another forward function."""
    forward = vars(module).get("forward")
    return (
        compiled_call_of(module) is not None or uncompiled_module(module) is not module or is_compiled_function(forward)
    )


def is_compiled_function(function: Any) -> bool:
    """Return whether `torch.compile` made a function, and not `torch.compiler.disable`, which marks functions alike.

    A wrapper of a compiled function, made by `functools.wraps`, has its attributes but wraps another function.
    """
    own = getattr(function, "__dict__", {})
    original = own.get("_torchdynamo_orig_callable")
    return original is not None and own.get("__wrapped__") is original and "_torchdynamo_disable" not in own


def runs_in_compiled_module() -> bool:
    """Return whether the result of `torch.compile(module)` is being called."""
    eval_frame: Any = torch._dynamo.eval_frame
    return bool(eval_frame._is_in_optimized_module())


def is_called(module: nn.Module, thread: int, *, beside: nn.Module | None = None) -> bool:
    """Return whether a call of a module is running.

    Args:
        module: The module.
        thread: Number of the thread (`threading.get_ident`).
        beside: Module whose call begins now, in this thread, and does not count.
    """
    num_others = int(module is beside and thread == threading.get_ident())
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is _CODE_OF_CALL and frame.f_locals.get("self") is module:
            if not num_others:
                return True
            num_others -= 1
        frame = frame.f_back
    return False


def apply_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function that `to`, `half`, `cuda` and the like call to change a module's parameters."""
    return module._apply


def uncompiled_module(module: nn.Module) -> nn.Module:
    """Return the module inside of `torch.compile`'s wrapper, or the module itself if it is no wrapper."""
    return children_of(module).get("_orig_mod") or module


def set_buffer(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put another tensor in a buffer's place."""
    module._buffers[name] = value


class _NamesHere(list[str]):
    """Names of parameters of one model. A copy of the model has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> list[str]:
        return []

    def __reduce__(self) -> Any:
        return list, ()


def leave_to_each_rank(model: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Have a later DDP neither broadcast nor reduce these parameters.

    Args:
        model: Model that DDP will wrap.
        names: Names of the parameters in the model.

    Returns:
        Function that ends this for a DDP that is built afterwards.
    """
    before = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    parameters = dict(model.named_parameters())
    ours = [name for name in names if not hasattr(parameters[name], "_ddp_ignored")]
    set_ignored = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    set_ignored(model, _NamesHere([*before, *ours]))  # type: ignore[no-untyped-call]

    def end() -> None:
        for name in ours:
            delattr(parameters[name], "_ddp_ignored")
        if before:
            set_ignored(model, before)  # type: ignore[no-untyped-call]
        else:
            del model._ddp_params_and_buffers_to_ignore

    return end


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let schedules know that an optimizer has stepped, if an engine steps in its place."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def default_group() -> Any:
    """Return the process group of the run, which must exist."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> Any:
    """Return the store of the run's process group, which torchrun's own agent uses, too."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[Any]:
    """List all process groups of this rank. Empty outside of a run on several ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    return list(dist.distributed_c10d._world.pg_map)


def takes_cpu_tensors(group: Any) -> bool:
    """Return whether a process group has a backend for tensors on the CPU.

    Args:
        group: The process group.
    """
    return torch.device("cpu") in group._device_types


def timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a process group's collectives. None if its backend does not tell.

    Args:
        group: The process group.
    """
    for device in group._device_types:
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timedelta(seconds=timeout.total_seconds())
    return None


def default_timeout_of(group: Any) -> timedelta:
    """Return torch's own timeout for a process group of this backend."""
    return dist.distributed_c10d._get_default_timeout(dist.get_backend(group))


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of a process group's collectives. torchtitan shortens timeouts in this way."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)
