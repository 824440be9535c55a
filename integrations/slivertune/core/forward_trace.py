"""Trace the order in which a forward reads parameters and enters blocks, on a copy of the model without data."""

import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slivertune.core.dummy_batch import dummy_batch
from slivertune.core.torch_internals import (
    READS_A_VALUE,
    TorchDispatchMode,
    is_without_data,
    outside_of_modes,
    tree_leaves,
    tree_map,
)


class _BlocksEntered(BaseException):
    """Ends a dummy forward that has entered all awaited blocks, past any `except Exception` of the model's."""


class _Recorder(TorchDispatchMode):
    """Records in which order a forward reads parameters and enters block lists, until it has entered all awaited."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: dict[int, int] = {}
        self.awaited: set[int] = set()

    def note(self, subject: object) -> None:
        self.moments.setdefault(id(subject), len(self.moments))

    def watch(self, blocks: nn.Module) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            self.note(blocks)
            self.awaited.discard(id(blocks))
            if not self.awaited:
                raise _BlocksEntered

        for module in blocks.modules():
            module.register_forward_pre_hook(enter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                self.note(tensor)
        if func is READS_A_VALUE and tensors[0].is_meta:
            return 1  # meta tensors have no values, but models ask whether a mask is all true
        if any(tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _on_meta(value: Any) -> Any:
    """Return a tensor or a device without data, for an operator whose other tensors have none."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


def trace_forward(model: nn.Module, block_lists: Iterable[str]) -> tuple[dict[str, int], list[str]]:
    """Run a meta copy of the model on a dummy batch until it has entered its blocks.

    If that fails, each transformers model inside it gets its own batch (pixels for an image tower, ids for a decoder).

    Args:
        model: The model.
        block_lists: Paths of its lists of blocks.

    Returns:
        Moments by name (first read of a parameter, first entry into a list of blocks), and the failures.
    """
    # The batch has values, also where a model's weights have none.
    with outside_of_modes() if is_without_data() else nullcontext():
        return _trace(model, block_lists)


def _trace(model: nn.Module, block_lists: Iterable[str]) -> tuple[dict[str, int], list[str]]:
    recorder, failures = _Recorder(), []
    try:
        twin = _meta_twin(model)
    except Exception as error:  # anything attached to a module may refuse to be copied
        return {}, [f"it can't be copied: {error!r}"]
    lists = {path: twin.get_submodule(path) for path in block_lists}
    for blocks in lists.values():
        recorder.watch(blocks)
    for module in (each for each in twin.modules() if each is twin or hasattr(each, "main_input_name")):
        inside = {id(each) for each in module.modules()}
        recorder.awaited = {id(blocks) for blocks in lists.values()} & inside - recorder.moments.keys()
        if not recorder.awaited:
            continue
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
                warnings.simplefilter("ignore")
                with recorder, torch.device("cpu"), torch.autocast("cpu", enabled=False):
                    # transformers' cache of a model without attention fails in training's forward.
                    takes_cache = "use_cache" in inspect.signature(module.forward).parameters
                    module(**dummy_batch(module), **({"use_cache": False} if takes_cache else {}))
        except _BlocksEntered:
            continue
        except Exception as error:  # a dummy batch may not suit the model; the record until then counts
            failures.append(f"{type(module).__name__}: {error!r}")
    subjects = (*twin.named_parameters(remove_duplicate=False), *lists.items())
    return {name: recorder.moments[id(each)] for name, each in subjects if id(each) in recorder.moments}, failures


class _CopyToMeta(TorchFunctionMode):
    """Lets `copy.deepcopy` make empty meta tensors of all tensors that are not parameters."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        return func(*args, **(kwargs or {}))


def _meta_twin(model: nn.Module) -> nn.Module:
    """Copy a model without its data, hooks, patched forwards and ties."""
    copies: dict[int, Any] = {}
    for parameter in model.parameters():
        copies[id(parameter)] = nn.Parameter(torch.empty(0, dtype=torch.float32, device="meta"), requires_grad=False)
    for module in model.modules():
        copies.update({id(value): OrderedDict() for name, value in vars(module).items() if name.endswith("_hooks")})
    with _CopyToMeta():
        twin = copy.deepcopy(model, copies)
    for module, original in zip(twin.modules(), model.modules(), strict=True):
        # Accelerate puts its own there, which moves the inputs to the device of the weights.
        vars(module).pop("forward", None)
        for name, parameter in original.named_parameters(recurse=False):
            # One per owner: reading an embedding must not count as reading the head that is tied to it.
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            own = nn.Parameter(empty, requires_grad=False)
            vars(own).update(vars(parameter) | vars(own))  # bitsandbytes keeps the state of a 4-bit weight there
            module.register_parameter(name, own)
    return twin.eval()
