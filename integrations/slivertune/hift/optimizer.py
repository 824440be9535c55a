"""HiFT around any optimizer class: one group of layers per step (HiFT, Algorithm 1).

This file is as long as its documented interface. A `Rotation` knows the active group, a `ResidentGroup` or a
`StreamedGroup` steps each group, `ModelHooks` hooks the model, `checkpoint` builds and checks saved states, and
`CheckpointedSliver` hands them out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from slivertune.core.hyperparameters import load_hyperparameters
from slivertune.core.layers import find_layers
from slivertune.core.layout import Layout, world_size
from slivertune.core.parameters import check_free, num_elements, release, take
from slivertune.core.sliver import CheckpointedSliver
from slivertune.hift.base import BaseOptimizer, refuse_settings
from slivertune.hift.checkpoint import check_accepted, check_header, check_weights, make_header
from slivertune.hift.config import HiFTConfig
from slivertune.hift.host_gradients import HostGradients, bytes_of
from slivertune.hift.host_room import check_host_room
from slivertune.hift.in_backward import BackwardSteps, is_accumulating_by_accelerate
from slivertune.hift.layers_above import LayersAbove
from slivertune.hift.model_hooks import ModelHooks
from slivertune.hift.offload_buffer import waiting_bytes
from slivertune.hift.piece import Weight, drop_gradient
from slivertune.hift.prefetch import Prefetcher
from slivertune.hift.probe import StepMeter, try_step
from slivertune.hift.residencies import residencies_of
from slivertune.hift.residency import WeightState, adapted_hyperparameters, restore_state
from slivertune.hift.resident_blocks import StreamedModel
from slivertune.hift.rotation import LearningRate, Rotation, cut_groups, scheduled_lr, turn_order
from slivertune.hift.streamed import StreamedGroup
from slivertune.hift.streamed_blocks import release_detached
from slivertune.hift.trainable import check_master, say_what_is_not_trained, trainable_weights
from slivertune.hift.unsupported import clash_with_layout
from slivertune.hift.waiting_layers import WaitingLayers
from slivertune.hift.waiting_weight import WaitingWeight


class HiFT(CheckpointedSliver):
    """Full-parameter fine-tuning, one group of layers per step (HiFT, arXiv 2401.15207).

    The constructor freezes all groups but the first. `step` applies the base optimizer to the active group, drops its
    gradients and passes the turn on. Masters and optimizer state are offloaded to host memory between turns. Peak
    memory of the device is the weights, one group's gradients, and two chunks of `config.stream_bytes`. With one
    group and one step per turn, this is the base optimizer, to the bit.

    `param_groups` always shows the scheduler's learning rate. The applied rate is read in the first step of a cycle
    and held to its end (`held_lr`; the paper's delayed update, section 3.1). A rate of 0, with which a warm-up
    begins, is not held: the next step reads it again. Start the search at the rate of ordinary fine-tuning, and try
    twice and four times it; with one update per turn, half and twice it (docs/hift.md, learning rate).

    `groups[index].layers` are the layers of a group, bottom of the model first. `grad_norm` is the 2-norm of the last
    update's gradients before clipping (a scalar tensor), if `config.max_grad_norm` is set, else None.

    Args:
        model: Model in fp32 or bf16, on its device before the first step.
        optimizer_class: Any class of `torch.optim.Optimizer`. `HiFT.wrap` takes an instance with its param groups.
        config: Settings; by default those of `HiFTConfig()`.
        **optimizer_kwargs: Arguments of the class, such as lr and weight_decay.

    Raises:
        ValueError: If the model's weights are fp16, no layers are found, a setting does not fit the model, or the
            class can't be rotated.

    Example:
        >>> optimizer = HiFT(model, torch.optim.AdamW, lr=2e-5, weight_decay=0.01)
        >>> model(**batch).loss.backward()
        >>> optimizer.step()
    """

    method = "hift"
    without_state = "masters, moments and the turn would start from zero in the middle of a run"
    may_differ = frozenset({"state_dir", "state_ram_bytes"})
    title = "HiFT"
    refusal_to_add = "HiFT's groups are fixed for the whole run. Pass all parameters when it is built"
    refusal_to_copy = (
        "HiFT can't be copied or pickled: it is attached to its model and steps that one. Save state_dict(), and "
        "load it into a HiFT that is built over the other model"
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        config: HiFTConfig | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        config = config or HiFTConfig()
        refuse_settings(optimizer_class, optimizer_kwargs)
        base = BaseOptimizer.of_class(optimizer_class, optimizer_kwargs, config.elementwise)
        self._build(model, base, [{"params": [each for each in model.parameters() if each.requires_grad]}], config)

    @classmethod
    def wrap(cls, optimizer: torch.optim.Optimizer, model: nn.Module, *, config: HiFTConfig | None = None) -> HiFT:
        """Build HiFT around an optimizer over the model's parameters that has not stepped yet.

        Its param groups are kept: weight-decay splits, learning rates by group. The instance itself is not used.

        Args:
            optimizer: The optimizer, or the wrapper that `accelerator.prepare` returned for it.
            model: Model whose parameters it was built over.
            config: Settings; by default those of `HiFTConfig()`.

        Returns:
            HiFT over the same param groups, to which a scheduler of the optimizer goes on writing rates.

        Raises:
            ValueError: As in the constructor, or if the optimizer was built over other parameters or has stepped.

        Example:
            >>> param_groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others}]
            >>> base = torch.optim.AdamW(param_groups, lr=2e-5)
            >>> optimizer = HiFT.wrap(base, model, config=HiFTConfig(layers_per_group=2))
        """
        config = config or HiFTConfig()
        inner: Any = optimizer
        if type(optimizer).__module__.startswith("accelerate."):
            inner = optimizer.optimizer  # type: ignore[attr-defined]
        if isinstance(inner, HiFT):
            raise ValueError("the optimizer to wrap is HiFT already. Wrap the base optimizer once")
        base = BaseOptimizer.of_instance(inner, config.elementwise)
        wrapped = cls.__new__(cls)
        # The same dictionaries: a scheduler that was built over the optimizer before goes on writing to them.
        wrapped._build(model, base, list(inner.param_groups), config)
        return wrapped

    def _build(
        self, model: nn.Module, base: BaseOptimizer, param_groups: list[dict[str, Any]], config: HiFTConfig
    ) -> None:
        if config.steps_in_backward and base.slicing.unit == "group":
            raise ValueError(
                f"gradients='stepped' steps each tensor alone, and {base.name} may look at the whole group. Declare "
                "elementwise=True if it does not, or set gradients='host'"
            )
        check_free(model.named_parameters(), "HiFT")
        release_detached(model)
        self._config = config
        self.base = base
        """Base optimizer, which builds further instances."""
        weights = trainable_weights(model, param_groups)
        self.groups = cut_groups(find_layers(model, config.layers), config.layers_per_group, frozenset(weights))
        """Groups, bottom of the model first."""
        try_step(base, param_groups, list(weights.values()))
        super().__init__(param_groups, dict(base.defaults))
        say_what_is_not_trained(model, weights)
        self._meter = StepMeter(base, self.param_groups, config)
        order = turn_order(len(self.groups), config.order, config.seed)
        self.rotation = Rotation(order=order, steps_per_group=config.steps_per_group)
        """Rotation of the groups' turns. A layout that steps in HiFT's place advances it."""
        self._num_parameters = [
            sum(num_elements(weights[name].parameter) for name in group.parameter_names) for group in self.groups
        ]
        self._applying: list[LearningRate] = []
        self.is_detached = False
        """Whether `detach` has ended the rotation."""
        self._engine: str | None = None
        self._backward_listeners: list[Callable[[], None]] = []
        self._has_host_memory = False
        self.grad_norm: torch.Tensor | None = None
        """2-norm of the last update's gradients before clipping, with `config.max_grad_norm`, else None."""
        self._host_gradients: HostGradients | None = None
        self._num_accumulating = 0
        self._in_backward: BackwardSteps | None = None
        if config.steps_in_backward:
            # The model's hooks must not keep an optimizer alive that everybody else has dropped.
            own = weakref.proxy(self)
            self._in_backward = BackwardSteps(
                weights,
                partial(HiFT._begin_update, own),
                partial(HiFT._step_weight, own),
                is_accumulating=partial(HiFT._is_accumulating, own),
                host_gradients=partial(HiFT._gradients_on_host, own),
                load_gradients=partial(HiFT._begin_last_backward, own),
            )
            self._backward_listeners.append(self._in_backward.watch_backward)
        self._streamed: StreamedModel | None = None
        self._end_inference: Callable[[], None] = lambda: None
        """Leaves on the host what `detach(for_inference=True)` loads."""
        self._room_in_backward = 0
        """Bytes that chunks may hold from the end of the forward on, with weights on the host."""
        if config.weights == "host":
            self._streamed = StreamedModel(model, self.groups, config.resident_bytes)
            weights = {name: replace(each, home=self._streamed.device) for name, each in weights.items()}
        self._bind(model, weights, checks_model=True)

    def _bind(self, model: nn.Module, weights: Mapping[str, Weight], *, checks_model: bool) -> None:
        check_master(self.config.master, weights.values())
        self._meter.compile_steps(weights.values())
        self._host_gradients = None
        self._prefetcher = Prefetcher(self.config.prefetch_bytes)
        self._residencies, self._disk = residencies_of(
            [[weights[name] for name in group.parameter_names] for group in self.groups],
            self._meter,
            self._prefetcher.slots_of,
        )
        self._above: LayersAbove | None = None
        if self.config.inactive == "above":
            of_groups = [residency.weights for residency in self._residencies]
            self._above = LayersAbove(of_groups, self.config, self.param_groups)
        self._waiting: WaitingLayers | None = None
        if self.config.waiting is not None:
            self._check_host_memory()
            home = None if self._streamed is None else self._streamed.device
            self._waiting = WaitingLayers(model, self.config.waiting, self._prefetcher, home)
        layers = [layer for group in self.groups for layer in group.layers]
        own = weakref.proxy(self)
        self._hooks = ModelHooks(
            model,
            layers,
            self.trained_weights,
            self._backward_listeners,
            on_forward=partial(HiFT._begin_forward, own),
            on_forward_end=partial(HiFT._end_forward, own),
            on_lack_of_memory=partial(HiFT._note_lack_of_memory, own),
            checks_model=checks_model,
            may_be_scaled=self.config.gradients == "device",
        )
        self._attach()

    def _attach(self) -> None:
        with ExitStack() as attached:
            self._hooks.attach()
            attached.callback(self._hooks.release)
            if self._in_backward is not None:
                self._in_backward.attach(self._hooks.model)
                attached.callback(self._in_backward.release)
            if self._waiting is not None:
                self._waiting.attach([each for each in self._residencies if isinstance(each, StreamedGroup)])
                attached.callback(self._waiting.remove)
            if self._streamed is not None:
                self._streamed.attach(self._hooks.model, self._waiting)
                attached.callback(self._streamed.blocks.release)
            take(self._parameters_of_state(), self)
            # Also called when the optimizer is dropped.
            self._take_off = weakref.finalize(self, attached.pop_all().close)
        self._take_off.atexit = False
        self.is_detached = False
        self._activate()

    def _activate(self) -> None:
        """Begin the turn of the active group, which alone has gradients unless the layers above it step, too."""
        residency = self._residencies[self.active_group]
        if self._disk is not None:
            self._disk.begin_turn(self.rotation.coming_groups)
        if self._waiting is not None:
            self._waiting.begin_turn(self.active_group)
        if self._streamed is not None:
            self._streamed.begin_turn(self.active_group)
        if self._in_backward is not None:
            above = [] if self._above is None else self._above.begin_turn(self.active_group)
            self._hooks.activate(residency.weights, self._in_backward.on_gradient, above)
        elif self.config.gradients == "host":
            self._hooks.activate(residency.weights, partial(HiFT._offload_gradient, weakref.proxy(self)))
        else:
            self._hooks.activate(residency.weights, lambda _: residency.prefetch(in_backward=True))

    def _offload_gradient(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)
        self._gradients_on_host().take(parameter)
        self._residencies[self.active_group].prefetch(in_backward=True)

    def _gradients_on_host(self) -> HostGradients:
        """Return the owner of the gradients on the host: of the active group, and of the layers above if they step."""
        reached = self._residencies[self.active_group :] if self._above else [self._residencies[self.active_group]]
        weights = [weight for residency in reached for weight in residency.weights]
        streams = self._prefetcher.slots_of(weights[0].device).streams
        if self._host_gradients is None or self._host_gradients.streams is not streams:
            self._check_host_memory()
            self._host_gradients = HostGradients(
                streams,
                in_flight_bytes=self.config.stream_bytes,
                num_bytes=self._most_gradient_bytes(),
            )
        self._host_gradients.begin_turn(weights)
        return self._host_gradients

    def _most_gradient_bytes(self) -> int:
        """Return the bytes of the most gradients that an update has on the host."""
        sizes = [bytes_of(residency.weights) for residency in self._residencies]
        return max(sizes) if self._above is None else sum(sizes)

    def _begin_last_backward(self) -> None:
        """Begin an update's last backward, which steps: load offloaded gradients of earlier ones with their chunks."""
        if self._host_gradients is not None:
            self._host_gradients.adds_in_step = True
            self._residencies[self.active_group].load_gradients()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Mark backward passes as not the last of their update, for `gradients="stepped"` in a plain loop.

        Accelerate's `accumulate` and the Trainer's gradient accumulation do so by themselves. With other settings this
        is not needed, and changes nothing.

        Example:
            >>> for index, batch in enumerate(batches):
            ...     with optimizer.accumulating() if index < last else nullcontext():
            ...         model(**batch).loss.backward()
            >>> optimizer.step()
        """
        self._num_accumulating += 1
        try:
            yield
        finally:
            self._num_accumulating -= 1

    def _is_accumulating(self) -> bool:
        return self._num_accumulating > 0 or is_accumulating_by_accelerate()

    def _begin_forward(self, inputs: Any) -> None:
        if self.is_detached:
            return
        if self._waiting is not None:
            self._waiting.begin_forward()
        residency = self._residencies[self.active_group]
        if self._streamed is None:
            self._prefetcher.begin_forward(residency, self.active_group, inputs)
            return
        self._streamed.blocks.begin_forward()
        self._room_in_backward = self._prefetcher.room_in(self.active_group, inputs)
        if not self._room_in_backward:
            self._prefetcher.load_ahead(residency, 0)

    def _end_forward(self, has_succeeded: bool) -> None:
        if self._streamed is None:
            return
        self._streamed.blocks.end_forward()
        if has_succeeded and self._room_in_backward and not self.is_detached:
            # In the forward the bus is busy with weights. The backward takes longer, and needs fewer of them.
            self._prefetcher.load_ahead(self._residencies[self.active_group], self._room_in_backward)

    def _note_lack_of_memory(self) -> None:
        if self._streamed is not None:
            self._streamed.note_lack_of_memory()
        self._prefetcher.note_lack_of_memory(self._residencies[self.active_group])

    @property
    def config(self) -> HiFTConfig:
        """Settings of this HiFT."""
        return self._config

    @property
    def num_groups(self) -> int:
        """Number of groups (k)."""
        return len(self.groups)

    def weights_of(self, group: int) -> tuple[Weight, ...]:
        """Return the trained weights of a group.

        Args:
            group: Index of the group, bottom of the model first.
        """
        return self._residencies[group].weights

    @property
    def trained_weights(self) -> tuple[Weight, ...]:
        """Trained weights of all groups, bottom of the model first."""
        return tuple(weight for residency in self._residencies for weight in residency.weights)

    @property
    def compiles_steps(self) -> bool:
        """Whether steps in tiles are compiled (`HiFTConfig.compile_step`)."""
        return self._meter.is_compiled_on(self.trained_weights[0].device)

    def waiting_weight(self, parameter: torch.Tensor) -> WaitingWeight | None:
        """Return the holder of a parameter that is quantised between its turns (`config.waiting`), or None.

        Args:
            parameter: Parameter of the model.
        """
        return None if self._waiting is None else self._waiting.weight_of(parameter)

    def make_codes(self) -> None:
        """Quantise now what the next forward would, with `config.waiting`. Do nothing if all weights have codes."""
        if self._waiting is not None:
            self._waiting.make_codes()

    @property
    def waiting_weight_bytes(self) -> int:
        """Bytes of weights that are offloaded to the host, 0 with `weights="device"`."""
        return 0 if self._streamed is None else self._streamed.blocks.weights.waiting_bytes

    @property
    def active_group(self) -> int:
        """Index of the group that the next step updates."""
        return self.rotation.active_group

    @property
    def updates(self) -> int:
        """Updates applied so far, without skipped steps."""
        return self.rotation.updates

    @property
    def skipped_turns(self) -> dict[int, int]:
        """Steps by group that passed without an update, because no gradient reached the group."""
        return dict(self.rotation.skipped)

    @property
    def cycle_length(self) -> int:
        """Steps per cycle, in which every group has one turn."""
        return self.rotation.cycle_length

    @property
    def held_lr(self) -> list[LearningRate]:
        """Learning rates of the current cycle, one per param group. Before the first step, the schedule's."""
        return list(self.rotation.held_lr) or scheduled_lr(self.param_groups)

    @property
    def applied_lr(self) -> float | None:
        """Learning rate of the first param group in the last update, None if the base optimizer chooses by itself."""
        lr = self.held_lr[0]
        return None if lr is None else float(lr)

    def metrics(self) -> dict[str, float]:
        """Return the last step's group, layers (from the bottom) and trained parameters, and all steps so far."""
        index = self.rotation.last_group
        first_layer = sum(len(group.layers) for group in self.groups[:index])
        return {
            "group": index,
            "first_layer": first_layer,
            "last_layer": first_layer + len(self.groups[index].layers) - 1,
            "trained_parameters": self._num_parameters[index],
            "skipped_turns": sum(self.rotation.skipped.values()),
            **super().metrics(),
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the active group from its gradients, drop them, and pass the turn on.

        If a backward ran since the last step and no gradient reached the group, its step passes without an update: no
        weight and no state changes, and `skipped_turns` counts it. If the layers above have stepped, it is an update. A
        step without a backward, or with dropped gradients, does not count: nothing changes, the turn stays. With
        stepped gradients the weights are updated already, and this passes the turn on. Zero gradients at rate 0 that no
        backward has brought come from `torch.distributed.checkpoint`: nothing changes.

        Args:
            closure: Function that evaluates the model again and returns the loss; called once, before the update.

        Returns:
            Value that the closure returned, or None.

        Raises:
            OSError: If `state="disk"` finds no space, a file can't be written or read, or holds other bytes than were
                written. Nothing was updated then. After a failed write nothing is lost, and the next call tries again.
            RuntimeError: If there are several ranks and HiFT was not prepared for them, an engine steps in its place,
                or a checkpoint's placeholder was loaded without the state that belongs to it.
            RuntimeError: If an earlier step failed, so that its update may be half done, or if there is a closure with
                stepped gradients.
        """
        self._check_step()
        may_initialise = closure is None and not self._hooks.has_brought_gradient() and self._hooks.has_gradient()
        if may_initialise and self._is_initialising():
            return None
        self._check_whole()
        if self.is_detached:
            raise RuntimeError("step() was called after detach(), which ended HiFT. Call reattach() to go on")
        loss = None
        if closure is not None:
            if self._in_backward is not None:
                raise RuntimeError(
                    "step(closure) would run the backward inside the step, and gradients='stepped' steps inside the "
                    "backward. Run the backward, then call step()"
                )
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        """Step the active group if gradients have reached it, and pass the turn on."""
        rotation = self.rotation
        is_stepped = self._in_backward is not None and self._in_backward.close()
        missed = self._hooks.end_update()
        if self._in_backward is None:
            is_stepped = self._step_from_gradients()
        if not is_stepped and not missed:
            rotation.note_idle_step(self.groups)
            return
        if missed:
            rotation.warn_of_skip(self.groups, others_step=is_stepped)
        self._begin_change("step()")
        if self._in_backward is not None:
            self._in_backward.end()
        self._pass_on(is_stepped=is_stepped, is_reached=not missed)
        self._end_change()
        rotation.warn_of_unreached(self.groups)

    def _pass_on(self, *, is_stepped: bool, is_reached: bool) -> None:
        """End an update, or a skipped one, and pass the turn on. The layers above may step in it alone."""
        rotation, residency = self.rotation, self._residencies[self.active_group]
        if is_stepped:
            residency.end()
        if self._host_gradients is not None:
            self._host_gradients.end_update()
        if self.config.state == "discard" and rotation.ends_turn:
            residency.discard()
        if is_stepped:
            rotation.advance(self._applying, is_reached=is_reached)
        else:
            rotation.skip(scheduled_lr(self.param_groups))
        if self._residencies[self.active_group] is not residency:
            if not is_stepped:
                residency.release()
            self._activate()
        ends_cycle = rotation.starts_cycle
        if ends_cycle and self._streamed is not None and self._streamed.end_cycle(self._largest_state_bytes):
            ends_cycle = False  # the measurement did not include the blocks that are resident now
        # With streamed weights, state is prefetched after the forward, not beside it.
        self._prefetcher.end_update(
            self._residencies[self.active_group] if self._streamed is None else None, ends_cycle=ends_cycle
        )

    def _largest_state_bytes(self) -> int:
        return max(self.state_sizes())

    def state_sizes(self) -> list[int]:
        """Return the bytes of each group's masters and state."""
        return [waiting_bytes(each.weights, self._meter).total() for each in self._residencies]

    def has_gradient(self) -> bool:
        """Return whether the active group has a gradient other than the zeros that a GradScaler is given."""
        return self._hooks.has_gradient()

    def _step_from_gradients(self) -> bool:
        """Step the active group, if it has gradients. The change of weights that this begins ends with the update."""
        weights = self._residencies[self.active_group].weights
        for weight in weights:
            if weight.trained is not weight.parameter:
                weight.take_gradient()
        if all(weight.parameter.grad is None for weight in weights):
            return False
        self._begin_update()
        self._begin_change("step()")
        for weight in weights:
            if weight.trained is not weight.parameter:
                weight.trained.grad = None  # so that it is freed as soon as its last chunk is stepped
        if self.config.max_grad_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(
                [weight.parameter for weight in weights], self.config.max_grad_norm
            )
        with self._hooks.stepping():
            self._residencies[self.active_group].step(weights, self.param_groups, self._applying)
        return True

    def _check_step(self) -> None:
        """Refuse a step that the other ranks would not know of, or that is not HiFT's."""
        self._check_not_delegated()
        self._check_param_groups()
        if self._layout is None and world_size() > 1:
            raise RuntimeError(
                f"HiFT runs on {world_size()} ranks, and nothing averages their gradients. Prepare it "
                "with slivertune.prepare(accelerator, ...), slivertune.initialize(...) for bare DeepSpeed, or "
                "slivertune.attach(trainer, ...) for the Trainer"
            )
        if self._awaited is not None:
            self._check_awaited()
        if self._disk is not None:
            self._disk.check()

    def _check_not_delegated(self) -> None:
        if self._engine is not None:
            raise RuntimeError(
                f"{self._engine} steps in HiFT's place. Step, save and load with the object that slivertune.prepare or "
                "slivertune.initialize returned"
            )

    def _begin_update(self) -> None:
        self._check_step()  # stepped gradients change weights in the backward, before `step` checks
        self._check_whole()
        self._check_host_memory()
        if self._waiting is not None:
            self._waiting.arrive(self.active_group)
        if self._streamed is not None:
            self._streamed.begin_step()
        self._residencies[self.active_group].begin(stays=not self.rotation.ends_turn, update=self.rotation.updates)
        self._applying = self.rotation.to_apply(scheduled_lr(self.param_groups))
        if self._above is not None:
            self._above.begin(self.rotation.updates, self._applying)

    def _check_host_memory(self) -> None:
        if not self._has_host_memory:
            check_host_room(self._residencies, self._meter, self._disk)
            self._has_host_memory = True
        self._open_disk()

    def _open_disk(self) -> None:
        """Reserve the space of `state="disk"`, unless this was done before."""
        if self._disk is not None and self._disk.files is None:
            self._disk.open(self.state_sizes())
            self._disk.begin_turn(self.rotation.coming_groups)

    @torch.no_grad()
    def _step_weight(self, weight: Weight) -> bool:
        """Step a weight inside the backward, and return whether it is one of the active group."""
        with self._hooks.stepping():
            if self._above is not None and self._above.holds(weight):
                self._above.step(weight)
                return False
            self._residencies[self.active_group].step((weight,), self.param_groups, self._applying)
            return True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False, since `GradScaler.step`, which asks first, must find the gradients and unscale them itself.

        Raises:
            RuntimeError: If `config.gradients` is not `device`, so that the gradients are gone by then.
        """
        if self.config.steps_in_backward:
            raise RuntimeError(
                "a GradScaler unscales gradients after the backward, and gradients='stepped' has updated the weights "
                "by scaled gradients before. Start again, in bf16 or with gradients='device'"
            )
        if self.config.gradients == "host":
            raise RuntimeError(
                "a GradScaler unscales all gradients at once, and gradients='host' keeps them in host memory. Train in "
                "bf16, or set gradients='device'"
            )
        return False

    def detach(self, *, for_inference: bool = False) -> None:
        """End the rotation: let every parameter have gradients as before HiFT was built, and remove the hooks.

        Weights keep their trained values. `step` raises from now on; `reattach` continues.

        Args:
            for_inference: With `weights="host"`, whether the blocks still come to the device for forwards without
                gradients (evaluation, generation), until the model is moved or cast or another HiFT is built over it.
                False leaves them on the host.
        """
        if self._engine is not None:
            return
        self._end_inference()
        if not self.is_detached:
            self._take_off()
            self._prefetcher.load_ahead(self._residencies[self.active_group], 0)
            release(self._parameters_of_state(), self)
            if self._hooks.checks_model:
                self._hooks.free_successors()
            self.is_detached = True
        if for_inference and self._streamed is not None:
            # It lasts longer than this optimizer: a function that trained the model may return it.
            is_quantised = self._waiting is not None
            self._end_inference = self._streamed.attach_for_inference(self._hooks.model, is_quantised=is_quantised)

    def reattach(self) -> None:
        """Continue after `detach`, with the same groups, masters and state.

        Raises:
            ValueError: If another optimizer trains a parameter of the model now.
            RuntimeError: If a parameter was replaced or cast meanwhile.
        """
        if not self.is_detached:
            return
        self._end_inference()
        check_free(self._hooks.model.named_parameters(), "HiFT")
        if self._hooks.checks_model:
            self._hooks.check()
        self._attach()

    def check_built_over(self, model: nn.Module) -> None:
        """Check that every trained weight is one of a model's.

        Raises:
            ValueError: If one is not, with its name.
        """
        parameters = set(model.parameters())
        for weight in self.trained_weights:
            if weight.trained not in parameters:
                raise ValueError(
                    f"the HiFT trains {weight.name} of another model than the one that was passed. Build it over this "
                    "model, before anything wraps or copies that"
                )

    def check_model(self) -> None:
        """Check that the model holds the trained parameters, as each forward does unless a layout has replaced them.

        Raises:
            RuntimeError: If a parameter was replaced, cast or added, with its name and the way out.
        """
        self._hooks.check()

    def listen_to_backward(self, listener: Callable[[], None]) -> None:
        """Register a function to call when a backward of the model begins, whether or not it will reach the group.

        Args:
            listener: Function to call once inside of each backward.
        """
        self._backward_listeners.append(listener)

    def wait_for_means(self) -> Callable[[nn.Parameter], None]:
        """Let stepped gradients wait until they are the mean over all ranks.

        Returns:
            Function to call, inside the backward, with each parameter whose gradient is the mean. It does nothing if
            gradients are not stepped.
        """
        if self._in_backward is None:
            return lambda parameter: None
        self._in_backward.waits_for_means = True
        return self._in_backward.on_mean

    def delegate_to(self, engine: str) -> None:
        """Let an engine step the groups in HiFT's place.

        Nothing is frozen or hooked any more. `step`, `state_dict` and `load_state_dict` raise from now on.

        Args:
            engine: Name of the engine, for messages.
        """
        self._take_off()
        self._engine = engine

    def release_parameters(self) -> None:
        """Forget the model and its parameters, so that they can be replaced. `rebind_parameters` sets new ones.

        Raises:
            RuntimeError: If a step was made already.
        """
        if self.rotation.steps:
            raise RuntimeError(
                f"HiFT has made {self.rotation.steps} steps, and parameters can only be replaced before the first. "
                "Call slivertune.prepare before it"
            )
        self._take_off()
        release(self._parameters_of_state(), self)
        self._residencies = []
        del self._hooks  # they hold the parameters, too
        self._fill_placeholder()

    def rebind_parameters(self, model: nn.Module, weights: Mapping[str, Weight]) -> None:
        """Train these parameters in place of those that `release_parameters` forgot.

        Args:
            model: Model that holds them.
            weights: Weights by the names in `groups`. Their `trained` parameters are in `param_groups` already.
        """
        self._bind(model, weights, checks_model=False)
        self._note_param_groups()
        self._fill_placeholder()

    def whole_state(self) -> dict[str, Any]:
        """Return the state that `state_dict` returns on one process. If weights are sharded, tensors are local shards.

        Raises:
            RuntimeError: If an update has failed, or is open: with stepped gradients, between a backward and `step`.
        """
        self._check_no_update_is_open()
        state = {name: values for each in self._residencies for name, values in each.export().items()}
        return {**self.state_header(state), "state": state}

    def state_by_group(self) -> Iterator[dict[str, WeightState]]:
        """Yield the state of each group as `whole_state` has it, bottom of the model first.

        With `state="disk"` its tensors are in host memory until the next group is requested, so that each file is read
        once and its checksum compared.

        Raises:
            RuntimeError: As `whole_state`.
            OSError: With `state="disk"`, if a file can't be read or written.
        """
        self._check_no_update_is_open()
        for residency in self._residencies:
            yield residency.export(lasts=False)
        if self._disk is not None:
            self._disk.begin_turn(self.rotation.coming_groups)

    def state_header(self, names: Iterable[str]) -> dict[str, Any]:
        """Return everything in `whole_state` but the state of the weights.

        Args:
            names: Names of the weights that have state.
        """
        header = self._header()
        header["hift"]["weights"] = list(names)
        return {**header, "own": adapted_hyperparameters(self._residencies)}

    def _check_no_update_is_open(self) -> None:
        self._check_not_delegated()
        self._check_whole()
        if self._in_backward is not None:
            self._in_backward.check_closed()

    @property
    def has_own_files(self) -> bool:
        """Whether groups' state is stored in files, so that a checkpoint has it in a folder of its own."""
        return self._disk is not None

    def load_whole_state(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of `whole_state`. All tensors are copied to the storage that `config.state` names.

        Weights with an fp32 master in the state are set to it, rounded. Storage (`state`) and chunk size may differ
        from the saved run; model, groups, turns and base optimizer may not.

        Raises:
            ValueError: If the state is of another model, grouping or optimizer, or is damaged. Nothing is changed then.
        """
        self._check_not_delegated()
        for slots in self._prefetcher.slots.values():
            slots.streams.synchronize()  # the given state may be this one's own, which copies still write
        check_header(state_dict, self._header())
        check_accepted(state_dict["param_groups"], self.param_groups, self.base)
        check_weights(state_dict["state"], self.trained_weights, self._meter)
        if self._half_done is not None or self._in_backward is not None:
            self._drop_gradients()
        self._begin_change("load_state_dict()")
        if self._in_backward is not None:
            self._in_backward.forget()
        load_hyperparameters(self.param_groups, state_dict["param_groups"])
        self.rotation.restore(state_dict["hift"])
        self._open_disk()
        if self._disk is not None:
            self._disk.begin_turn(())
        restore_state(self._residencies, state_dict["state"], state_dict.get("own", {}))
        if self._waiting is not None:
            self._waiting.forget_codes()
        if not self.is_detached:
            self._activate()
        self._end_change()
        if self.uses_sidecar:
            self._fill_placeholder()

    def _drop_gradients(self) -> None:
        """Drop the gradients of an update that is half done."""
        for weight in self.trained_weights:
            drop_gradient(weight)
            weight.trained.grad = None
        if self._host_gradients is not None:
            self._host_gradients.end_update()

    def _parameters_of_state(self) -> list[torch.nn.Parameter]:
        return [weight.trained for weight in self.trained_weights]

    def _header(self) -> dict[str, Any]:
        return make_header(self.identity(), self.rotation, self.param_groups, self.trained_weights)

    def unsupported(self, layout: Layout) -> str | None:
        """Return why this HiFT can't be trained under a layout, with the way out, or None if it can."""
        config = self.config
        return clash_with_layout(
            layout,
            self.base,
            state=config.state,
            master=config.master,
            gradients=config.gradients,
            state_ram_bytes=config.state_ram_bytes,
            waiting=config.waiting,
            weights=config.weights,
        )

    def facts(self) -> dict[str, object]:
        """Return the facts that every rank must share: settings, hyperparameters, groups, and their parameters."""
        facts = {"base optimizer": self.base.name, **super().facts(), "order of the groups": self.rotation.order}
        for group in self.groups:
            facts[f"group {group.index}"] = group.parameter_names
            for weight in self.weights_of(group.index):
                facts[weight.name] = (tuple(weight.trained.shape), str(weight.trained.dtype), weight.param_group)
        return facts

    def identity(self) -> dict[str, object]:
        """Return the entries that a saved state shares with every optimizer that it fits, in plain containers."""
        return {
            "optimizer": self.base.name,
            "groups": [list(group.parameter_names) for group in self.groups],
            "order": [self.config.order, *self.rotation.order],
            "steps_per_group": self.rotation.steps_per_group,
            "waiting": self.config.waiting,
            "rounding": self.config.seed if self.config.master == "stochastic" else None,
        }
