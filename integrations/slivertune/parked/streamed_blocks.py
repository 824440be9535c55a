"""Hooks that load offloaded blocks just ahead of their forward, and again for their backward.

A frozen block below the trained ones has no backward, and is loaded once per step. The others are loaded again, from
the top down: each when its last operator's backward begins, or before its recomputation if it is checkpointed. It keeps
its slot until the same moment of the block below.

For a weight saved outside of a checkpoint, autograd stores only the block and its place there. When it is needed, it is
made again from the slot of the block at that time. So no saved tensor is a view of another block's slot.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from slivertune.core.module_hook import ModuleHook, StandIn, put_stand_in
from slivertune.core.outputs import tensors_of
from slivertune.core.refused_pairs import Feature, attach_feature
from slivertune.core.torch_internals import (
    NO_BACKWARD,
    apply_of,
    at_end_of_backward,
    end_saved_tensors_hooks,
    is_called,
    running_backward,
    saved_tensors_hooks_now,
    version_of,
)
from slivertune.parked.host_weights import HostWeights


@dataclass(slots=True, eq=False)
class _Call:
    """A call of a block."""

    block: int
    hooks: torch.autograd.graph.saved_tensors_hooks | None
    """Hooks that save its tensors, None without gradients."""
    inputs: frozenset[int]
    """`id`s of its tensors, while it runs."""
    begun_in: int = NO_BACKWARD
    """Last backward that has reached it."""


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """A tensor that was saved for a backward, as torch saves it: an output apart from its graph, which would hold it.

    torch checks no version of tensors that hooks have saved.
    """

    values: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _SavedTensor:
        """Save a tensor."""
        return cls(tensor.detach(), version_of(tensor))

    def unpack(self) -> torch.Tensor:
        """Return the values.

        Raises:
            RuntimeError: If they were written since.
        """
        if version_of(self.values) != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.values.shape)} that a backward needs was modified by an in-place "
                "operation after its forward, such as an optimizer's step. Run the backward before it, or the forward "
                "again after it"
            )
        return self.values


@dataclass(frozen=True, slots=True)
class _SavedWeight:
    """A view of a block's weights that was saved for a backward."""

    block: int
    start: int
    """First byte of the view in the block's slot."""
    form: torch.Tensor
    """Form of the view, on the meta device."""
    version: int
    """Version of the weight."""


class StreamedBlocks:
    """Loads blocks' weights before they run, and puts them back. It does not hold the optimizer.

    Args:
        modules: All blocks of the model, by their index in `weights`. Resident ones are passed over.
        weights: Offloaded weights of the blocks.
    """

    def __init__(self, modules: Sequence[nn.Module], weights: HostWeights) -> None:
        self.weights = weights
        """Offloaded weights of the blocks."""
        self._modules = modules
        self._handles: list[RemovableHandle] = []
        self._running: list[_Call] = []
        self._ran: list[int] = []
        """Blocks that ran in this forward and will have a backward, in order."""
        self._thread = 0
        """Thread that runs the forwards."""
        self._task = NO_BACKWARD
        """Backward at whose end the loaded blocks are put back."""
        self.num_backwards = 0
        """Backward passes that have run to their end."""
        self._undo: list[Callable[[], None]] = []
        self._end_inference: Callable[[], None] | None = None

    def attach(self, model: nn.Module, end_inference: Callable[[], None] | None = None) -> None:
        """Put hooks on the blocks, and on the methods that move the model.

        Args:
            model: Model that holds the blocks.
            end_inference: Function that releases the blocks, if they are loaded for forwards without gradients alone.
                It is called before they are moved or cast, which is refused otherwise.

        Raises:
            RuntimeError: If the model or a block is compiled.
        """
        self._end_inference = end_inference
        self._undo.append(
            attach_feature(model, "blocks on the host", [each for block in self._modules for each in block.modules()])
        )
        own = weakref.proxy(self)
        for index, module in enumerate(self._modules):
            before, after = partial(StreamedBlocks._before, own, index), partial(StreamedBlocks._after, own, index)
            self._handles += [
                module.register_forward_pre_hook(ModuleHook(before), prepend=True, with_kwargs=True),
                module.register_forward_hook(ModuleHook(after), always_call=True),
                module.register_state_dict_post_hook(ModuleHook(partial(StreamedBlocks._show, own, index))),
                module.register_load_state_dict_pre_hook(ModuleHook(partial(StreamedBlocks._recover, own, index))),
            ]
        for module in (model, *self._modules):
            stand_in = _CheckedApply(
                apply_of(module), self.weights.device, self._modules, end_inference, is_block=module is not model
            )
            self._undo.append(put_stand_in(module, "_apply", stand_in))

    def release(self) -> None:
        """Offload all weights that are not resident, and remove the hooks. Later calls do nothing."""
        if not self._undo:
            return
        for handle in self._handles:
            handle.remove()
        for undo in self._undo:
            undo()
        self._handles, self._undo, self._end_inference = [], [], None
        self._end_calls()
        self.weights.take_all_back()

    @property
    def was_broken_off(self) -> bool:
        """Whether a backward has begun and not come to its end."""
        return self._task != NO_BACKWARD

    def begin_forward(self) -> None:
        """Begin an outermost forward: load the first blocks."""
        weights = self.weights
        self._thread = threading.get_ident()
        self._end_calls()
        weights.recover_all()
        weights.settle()
        for index in weights.streamed:
            weights.take_over_block(index)
        weights.forget()
        weights.send_back()
        self._ran = []
        self._task = NO_BACKWARD
        weights.expect(range(len(self._modules)))

    def _end_calls(self) -> None:
        """End the calls of a forward that Ctrl-C has ended, for which torch runs no hooks."""
        while self._running:
            hooks = self._running.pop().hooks
            if hooks is not None:
                end_saved_tensors_hooks(hooks)

    def end_forward(self) -> None:
        """End an outermost forward, even a failed one: wait for write backs, before anybody reads or writes weights."""
        self.weights.settle()
        self.weights.expect(self._ran[::-1])

    def _before(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._end_inference is not None:
            self._load_for_inference(index, self._end_inference)
            return
        if running_backward() == NO_BACKWARD:
            self.weights.bring(index)
        else:
            self._turn_to(index)  # recomputed with its hooks
        hooks = None
        if torch.is_grad_enabled():
            outer = saved_tensors_hooks_now()
            pack, unpack = outer if outer is not None else (_SavedTensor.of, _SavedTensor.unpack)
            hooks = torch.autograd.graph.saved_tensors_hooks(
                partial(self._pack, pack), partial(_unpack, self._bring_saved, unpack)
            )
            hooks.__enter__()  # `_after` exits, or after Ctrl-C the next `begin_forward`
        self._running.append(_Call(index, hooks, frozenset(map(id, tensors_of((args, kwargs))))))

    def _load_for_inference(self, index: int, end: Callable[[], None]) -> None:
        """Load a block alone: whoever calls it, and whatever was written since the last call, its values are right."""
        if not torch.is_grad_enabled():
            self.weights.take_over_block(index)
            self.weights.bring(index)
        elif self.weights.device.type == "cpu":
            end()  # all weights are where the model computes
        else:
            raise RuntimeError(
                "HiFT has ended, and leaves the blocks in host memory, where gradients can't be "
                "computed. Run the model under torch.no_grad(). To train it in another way, move it to the CPU first "
                "(model.to('cpu')), and then to its device"
            )

    def _after(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._end_inference is not None:
            self.weights.begin_writing(index)
            return
        if not self._running or self._running[-1].block != index:
            return  # it failed before it began
        call = self._running.pop()
        is_in_forward = running_backward() == NO_BACKWARD
        if is_in_forward:
            self.weights.put_back(index)
        if call.hooks is None:
            return
        call.hooks.__exit__()
        # An input that is passed on comes from another block, and gets its gradient amid that one's backward.
        outputs = [each for each in tensors_of(output) if each.requires_grad and id(each) not in call.inputs]
        for tensor in outputs:
            tensor.register_hook(partial(self._begin_backward, call))
        if outputs and is_in_forward:
            self._ran.append(index)

    def _recover(self, index: int, module: nn.Module, *others: Any) -> dict[int, torch.Tensor]:
        """Put back a block of a forward or backward that was broken off, before its state dict is read or loaded.

        Returns:
            As `HostWeights.recover`.
        """
        is_running = running_backward() != NO_BACKWARD or is_called(module, self._thread)
        if is_running or self._thread != threading.get_ident():
            return {}
        self.weights.settle()
        return self.weights.recover(index)

    def _show(self, index: int, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        """Give each weight in a state dict its own storage: programs take weights that share one for tied."""
        on_host = self.weights.copy_to_host(index) | self._recover(index, module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            key = f"{prefix}{name}"
            if id(parameter) in on_host and not isinstance(state_dict.get(key, parameter), nn.Parameter):
                state_dict[key] = on_host[id(parameter)]

    def _begin_backward(self, call: _Call, gradient: torch.Tensor) -> None:
        if not self._undo:
            return  # released
        if call.begun_in != running_backward():
            call.begun_in = running_backward()
            self._turn_to(call.block)

    def _turn_to(self, index: int) -> None:
        """Load a block for its backward, and put back the others, whose backward is over.

        Autograd runs, among the operators that can run, the one that came last in the forward. So when a block's last
        operator runs, no later block has one left.
        """
        if running_backward() != self._task:
            self._task = running_backward()
            self.weights.recover_all()
            self.weights.expect(self._ran[::-1])
            at_end_of_backward(self._end_backward)
        self.weights.put_all_back(but=index)
        self.weights.bring(index)

    def _end_backward(self) -> None:
        self._task = NO_BACKWARD
        self.num_backwards += 1
        self.weights.put_all_back()
        self.weights.expect(())

    def _pack(self, pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        found = self.weights.place_in_slot(tensor)
        if found is None:
            return pack(tensor)
        form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return _SavedWeight(*found, form, self.weights.version_at(*found))

    def _bring_saved(self, saved: _SavedWeight) -> torch.Tensor:
        if self.weights.version_at(saved.block, saved.start) != saved.version:
            raise RuntimeError(
                f"a weight of block {saved.block} was written or replaced after this forward, whose backward needs the "
                "value of before. Run the backward before the weights are changed or loaded"
            )
        form = saved.form
        values = self.weights.memory_from(saved.block, saved.start, loads=bool(self._undo))
        num_bytes = values.numel() // form.itemsize * form.itemsize
        found = values[:num_bytes].view(form.dtype).as_strided(form.shape, form.stride())
        # A gradient's gradient keeps it beyond the time of the slot.
        return found.clone() if torch.is_grad_enabled() else found


def _unpack(bring: Callable[[_SavedWeight], torch.Tensor], unpack: Callable[[Any], torch.Tensor], saved: Any) -> Any:
    return bring(saved) if isinstance(saved, _SavedWeight) else unpack(saved)


def release_detached(model: nn.Module) -> None:
    """Release the blocks that are loaded for inference alone, so that another optimizer may take them."""
    for module in list(model.modules()):
        stand_in = vars(module).get("_apply")
        while isinstance(stand_in, StandIn):
            if isinstance(stand_in, _CheckedApply) and stand_in.before_move is not None:
                stand_in.before_move()
            stand_in = stand_in.function


class _CheckedApply(StandIn):
    """`_apply` of a model or a block, which `to`, `half` and others call. Blocks need no move: they are in place.

    Args:
        function: Method of the module's own.
        device: Device on which the model computes.
        blocks: Blocks whose weights are loaded.
        before_move: Function that releases them before they are cast or moved. None refuses that.
        is_block: Whether the module is one of them, so that nothing in it is changed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: torch.device,
        blocks: Sequence[nn.Module],
        before_move: Callable[[], None] | None,
        *,
        is_block: bool,
    ) -> None:
        super().__init__(function)
        self._device, self._blocks, self._is_block = device, blocks, is_block
        self.before_move = before_move

    @property
    @override
    def feature(self) -> Feature | None:
        return "blocks on the host" if self._is_block else None

    def __call__(self, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Change everything around the blocks, if the change leaves these as they are.

        Raises:
            RuntimeError: If the blocks' weights would be cast or moved. Nothing is changed then.
        """
        for dtype in {parameter.dtype for block in self._blocks for parameter in block.parameters()}:
            before = torch.empty(0, dtype=dtype, device=self._device)
            after = change(before)
            if after.dtype != before.dtype or after.device != before.device:
                if self.before_move is not None:
                    self.before_move()
                    return self.function(change, recurse)
                raise RuntimeError(
                    f"blocks on the host can't become {after.dtype} on {after.device}: they are loaded to "
                    f"{before.device} in {before.dtype} when they run. Cast or move the model before that, or call "
                    "HiFT's detach(), or the parked layers' remove(), first"
                )
        return None if self._is_block else self.function(change, recurse)
