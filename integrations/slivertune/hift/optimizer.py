"""HiFT around any optimizer class: one group of layers per step (HiFT, Algorithm 1).

This file is as long as its documented interface. A `Rotation` knows the active group, `assemble` builds what steps the
groups and what stands beside it, `ModelHooks` hooks the model, `checkpoint` builds and checks saved states, and
`CheckpointedSliver` hands them out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from slivertune.core.hyperparameters import load_hyperparameters
from slivertune.core.layers import find_layers
from slivertune.core.layout import Layout, world_size
from slivertune.core.parameters import check_free, num_elements, release, take
from slivertune.core.sliver import CheckpointedSliver
from slivertune.hift.assembly import assemble
from slivertune.hift.base import BaseOptimizer, refuse_settings
from slivertune.hift.checkpoint import check_accepted, check_header, check_weights, make_header
from slivertune.hift.chunk import Weight
from slivertune.hift.config import HiFTConfig
from slivertune.hift.gradient_routes import Steps
from slivertune.hift.group_state import WeightState, adapted_hyperparameters, restore_state
from slivertune.hift.model_hooks import ModelHooks
from slivertune.hift.parts import Turn, Update, methods_by_moment
from slivertune.hift.probe import StepMeter, try_step
from slivertune.hift.rotation import LearningRate, Rotation, cut_groups, scheduled_lr, turn_order
from slivertune.hift.trainable import say_what_is_not_trained, trainable_weights
from slivertune.hift.unsupported import clash_with_layout
from slivertune.parked.quantized_weight import QuantizedWeight
from slivertune.parked.streamed_blocks import release_detached


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
    trains_frozen_weights = True
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
        self._rates: list[LearningRate] = []
        """Learning rates of the current update, one per param group."""
        self._is_dropped_after_turn = config.state == "discard"
        self.is_detached = False
        """Whether `detach` has ended the rotation."""
        self._engine: str | None = None
        self._backward_listeners: list[Callable[[], None]] = []
        self._has_host_room = False
        self._end_inference: Callable[[], None] = lambda: None
        """Leaves on the host what `detach(for_inference=True)` loads."""
        self._bind(model, weights, checks_model=True)

    def _bind(self, model: nn.Module, weights: Mapping[str, Weight], *, checks_model: bool) -> None:
        # Neither parts nor the model's hooks may keep an optimizer alive that everybody else has dropped.
        own = weakref.proxy(self)
        steps = Steps(
            begin=partial(HiFT._begin_update, own),
            begin_change=partial(HiFT._begin_change, own, "step()"),
            step=partial(HiFT._step_weights, own),
            stepping=partial(HiFT._stepping, own),
        )
        self._built = assemble(
            model, self.groups, weights, self._meter, self.param_groups, steps, self.rotation.coming_groups
        )
        self._states, self._route = self._built.states, self._built.route
        self._told = methods_by_moment(self._built.parts)
        layers = [layer for group in self.groups for layer in group.layers]
        self._hooks = ModelHooks(
            model,
            layers,
            self.trained_weights,
            # Outputs keep it in memory, and may outlive the optimizer.
            [partial(_begin_backward, weakref.ref(self))],
            on_forward=partial(HiFT._begin_forward, own),
            on_forward_end=partial(HiFT._end_forward, own),
            on_lack_of_memory=partial(HiFT._note_lack_of_memory, own),
            checks_model=checks_model,
            may_be_scaled=self._route.refusal_of_scaler is None,
        )
        self._attach()

    def _attach(self) -> None:
        with ExitStack() as attached:
            self._hooks.attach()
            attached.callback(self._hooks.release)
            for attach in self._told["attach"]:
                if (undo := attach(self._hooks.model)) is not None:
                    attached.callback(undo)
            take(self._parameters_of_state(), self)
            # Also called when the optimizer is dropped.
            self._take_off = weakref.finalize(self, attached.pop_all().close)
        self._take_off.atexit = False
        self.is_detached = False
        self._activate()

    def _activate(self) -> None:
        """Begin the turn of the active group, which alone has gradients unless the layers above it step, too."""
        turn = Turn(self.active_group, self.rotation.coming_groups, self._states[self.active_group])
        for begin_turn in self._told["begin_turn"]:
            begin_turn(turn)
        self._hooks.activate(turn.state.weights, self._route.on_gradient, self._route.beside)

    def accumulating(self) -> AbstractContextManager[None]:
        """Mark backward passes as not the last of their update, for `gradients="stepped"` in a plain loop.

        Accelerate's `accumulate` and the Trainer's gradient accumulation do so by themselves. With other settings this
        is not needed, and changes nothing.

        Example:
            >>> for index, batch in enumerate(batches):
            ...     with optimizer.accumulating() if index < last else nullcontext():
            ...         model(**batch).loss.backward()
            >>> optimizer.step()
        """
        return self._route.accumulating()

    def _begin_forward(self, inputs: Any) -> None:
        if not self.is_detached:
            for begin_forward in self._told["begin_forward"]:
                begin_forward(inputs)

    def _end_forward(self, has_succeeded: bool) -> None:
        for end_forward in self._told["end_forward"]:
            end_forward(has_succeeded=has_succeeded)

    def _note_lack_of_memory(self) -> None:
        for out_of_memory in self._told["out_of_memory"]:
            out_of_memory()

    @property
    def config(self) -> HiFTConfig:
        """Settings of this HiFT."""
        return self._config

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """2-norm of the last update's gradients before clipping, with `config.max_grad_norm`, else None."""
        return self._route.norm

    @property
    def num_groups(self) -> int:
        """Number of groups (k)."""
        return len(self.groups)

    def weights_of(self, group: int) -> tuple[Weight, ...]:
        """Return the trained weights of a group.

        Args:
            group: Index of the group, bottom of the model first.
        """
        return self._states[group].weights

    @property
    def trained_weights(self) -> tuple[Weight, ...]:
        """Trained weights of all groups, bottom of the model first."""
        return tuple(weight for state in self._states for weight in state.weights)

    @property
    def compiles_steps(self) -> bool:
        """Whether steps in tiles are compiled (`HiFTConfig.compile_step`)."""
        return self._meter.is_compiled_on(self.trained_weights[0].device)

    def quantized_weight(self, parameter: torch.Tensor) -> QuantizedWeight | None:
        """Return the holder of a parameter that is quantised between its turns (`config.waiting`), or None.

        Args:
            parameter: Parameter of the model.
        """
        return self._built.quantized_weight(parameter)

    def make_codes(self) -> None:
        """Quantise now what the next forward would, with `config.waiting`. Do nothing if all weights have codes."""
        self._built.make_codes()

    @property
    def offloaded_weight_bytes(self) -> int:
        """Bytes of weights that are offloaded to the host, 0 with `weights="device"`."""
        return self._built.offloaded_weight_bytes

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
            if not self._route.takes_closures:
                raise RuntimeError(
                    "step(closure) would run the backward inside the step, and gradients='stepped' steps inside the "
                    "backward. Run the backward, then call step()"
                )
            with torch.enable_grad():
                loss = closure()
        self._end_update()
        return loss

    def _end_update(self) -> None:
        """Step the active group if gradients have reached it and have not stepped it, and pass the turn on."""
        rotation = self.rotation
        self._route.close()
        missed = self._hooks.end_update()
        is_stepped = self._route.collect()
        if not is_stepped and not missed:
            rotation.note_idle_step(self.groups)
            return
        if missed:
            rotation.warn_of_skip(self.groups, others_step=is_stepped)
        self._begin_change("step()")
        self._pass_on(is_stepped=is_stepped, is_reached=not missed)
        self._end_change()
        rotation.warn_of_unreached(self.groups)

    def _pass_on(self, *, is_stepped: bool, is_reached: bool) -> None:
        """End an update, or a skipped one, and pass the turn on. The layers above may step in it alone."""
        rotation, state = self.rotation, self._states[self.active_group]
        if is_stepped:
            state.end()
        self._route.end()
        if self._is_dropped_after_turn and rotation.ends_turn:
            state.discard()
        if is_stepped:
            rotation.advance(self._rates, is_reached=is_reached)
        else:
            rotation.skip(scheduled_lr(self.param_groups))
        if self._states[self.active_group] is not state:
            if not is_stepped:
                state.release()
            self._activate()
        ends_cycle = rotation.starts_cycle
        for end_step in self._told["end_step"]:
            if end_step(ends_cycle=ends_cycle):
                ends_cycle = False  # what the cycle has measured did not include the bytes that stay now

    def state_sizes(self) -> list[int]:
        """Return the bytes of each group's masters and state."""
        return self._built.sizes()

    def has_gradient(self) -> bool:
        """Return whether the active group has a gradient other than the zeros that a GradScaler is given."""
        return self._hooks.has_gradient()

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
        for check_step in self._told["check_step"]:
            check_step()

    def _check_not_delegated(self) -> None:
        if self._engine is not None:
            raise RuntimeError(
                f"{self._engine} steps in HiFT's place. Step, save and load with the object that slivertune.prepare or "
                "slivertune.initialize returned"
            )

    def _begin_update(self) -> None:
        self._check_step()  # stepped gradients change weights in the backward, before `step` checks
        self._check_whole()
        rotation = self.rotation
        if not self._has_host_room:
            self._built.room.take()
            self._has_host_room = True
        update = Update(rotation.updates, rotation.to_apply(scheduled_lr(self.param_groups)))
        for begin_step in self._told["begin_step"]:
            begin_step(update)
        self._states[self.active_group].begin(stays=not rotation.ends_turn, update=update.number)
        self._rates = update.rates

    @torch.no_grad()
    def _step_weights(self, weights: Sequence[Weight]) -> None:
        self._states[self.active_group].step(weights, self.param_groups, self._rates)

    def _stepping(self) -> AbstractContextManager[None]:
        return self._hooks.stepping()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False, since `GradScaler.step`, which asks first, must find the gradients and unscale them itself.

        Raises:
            RuntimeError: If `config.gradients` is not `device`, so that the gradients are gone by then.
        """
        if self._route.refusal_of_scaler is not None:
            raise RuntimeError(self._route.refusal_of_scaler)
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
            for detach in self._told["detach"]:
                detach()
            self._take_off()
            release(self._parameters_of_state(), self)
            if self._hooks.checks_model:
                self._hooks.free_successors()
            self.is_detached = True
        if for_inference:
            # It lasts longer than this optimizer: a function that trained the model may return it.
            self._end_inference = self._built.attach_for_inference(self._hooks.model)

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
        return self._route.wait_for_means()

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
        self._states = []
        del self._hooks, self._built, self._route, self._told  # they hold the parameters, too
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
        state = {name: values for each in self._states for name, values in each.export().items()}
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
        for state in self._states:
            yield state.export(lasts=False)
        for after_save in self._told["after_save"]:
            after_save()

    def state_header(self, names: Iterable[str]) -> dict[str, Any]:
        """Return everything in `whole_state` but the state of the weights.

        Args:
            names: Names of the weights that have state.
        """
        header = self._header()
        header["hift"]["weights"] = list(names)
        return {**header, "own": adapted_hyperparameters(self._states)}

    def _check_no_update_is_open(self) -> None:
        self._check_not_delegated()
        self._check_whole()
        self._route.check_closed()

    @property
    def has_own_files(self) -> bool:
        """Whether groups' state is stored in files, so that a checkpoint has it in a folder of its own."""
        return self._built.has_files

    def load_whole_state(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of `whole_state`. All tensors are copied to the storage that `config.state` names.

        Weights with an fp32 master in the state are set to it, rounded. Storage (`state`) and chunk size may differ
        from the saved run; model, groups, turns and base optimizer may not.

        Raises:
            ValueError: If the state is of another model, grouping or optimizer, or is damaged. Nothing is changed then.
        """
        self._check_not_delegated()
        for before_load in self._told["before_load"]:
            before_load()
        check_header(state_dict, self._header())
        check_accepted(state_dict["param_groups"], self.param_groups, self.base)
        check_weights(state_dict["state"], self.trained_weights, self._meter)
        if self._half_done is not None:
            self._route.drop(self.trained_weights)
        self._begin_change("load_state_dict()")
        load_hyperparameters(self.param_groups, state_dict["param_groups"])
        self.rotation.restore(state_dict["hift"])
        for begin_load in self._told["begin_load"]:
            begin_load()
        restore_state(self._states, state_dict["state"], state_dict.get("own", {}))
        for after_load in self._told["after_load"]:
            after_load()
        if not self.is_detached:
            self._activate()
        self._end_change()
        if self.uses_sidecar:
            self._fill_placeholder()

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


def _begin_backward(own: weakref.ref[HiFT]) -> None:
    """Tell the route and the listeners of a HiFT that a backward begins, unless it was dropped."""
    hift = own()
    if hift is not None:
        hift._route.begin_backward()
        for listener in hift._backward_listeners:
            listener()
