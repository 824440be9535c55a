"""HiFT around any optimizer class: one group of layers per step (HiFT, Algorithm 1).

A `Rotation` knows the active group, `Turns` runs its turn over the model, `checkpoint` builds and checks saved states,
and `CheckpointedSliver` hands them out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.hyperparameters import load_hyperparameters
from slivertune.core.layers import find_layers
from slivertune.core.layout import Layout, world_size
from slivertune.core.parameters import check_free, num_elements, release, take
from slivertune.core.sliver import CheckpointedSliver
from slivertune.hift.base import BaseOptimizer, refuse_settings
from slivertune.hift.checkpoint import check_accepted, check_header, check_weights, make_header
from slivertune.hift.chunk import Weight
from slivertune.hift.config import HiFTConfig
from slivertune.hift.group_state import WeightState, adapted_hyperparameters
from slivertune.hift.probe import StepMeter, try_step
from slivertune.hift.rotation import LearningRate, Rotation, cut_groups, scheduled_lr, turn_order
from slivertune.hift.trainable import say_what_is_not_trained, trainable_weights
from slivertune.hift.turns import Guard, Turns
from slivertune.hift.unsupported import clash_with_layout
from slivertune.parked.streamed_blocks import release_detached


class EngineTurns(Protocol):
    """Turns that an engine runs over the model in HiFT's place."""

    def attach(self) -> None:
        """Freeze all groups but the active one, and hook the model."""

    def detach(self) -> None:
        """Unfreeze all groups, and remove the hooks from the model."""


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
            optimizer: The optimizer, which no Accelerator has prepared.
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
            raise ValueError(
                "accelerator.prepare has wrapped this optimizer, whose accumulation, scaling and checkpoints would not "
                "reach HiFT. Wrap it by HiFT before, and pass the HiFT to slivertune.prepare(accelerator, ...)"
            )
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
        layers = find_layers(model, config.layers)
        self.groups = cut_groups(layers, config.layers_per_group, frozenset(weights))
        """Groups, bottom of the model first."""
        layer_of = {name: index for index, layer in enumerate(layers) for name in layer.parameter_names}
        weights = {name: replace(weight, layer=layer_of[name]) for name, weight in weights.items()}
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
        self.is_detached = False
        """Whether `detach` has ended the rotation."""
        self._engine: str | None = None
        self._engine_turns: EngineTurns | None = None
        self._end_inference: Callable[[], None] = lambda: None
        """Leaves on the host what `detach(for_inference=True)` loads."""
        self._bind(model, weights, checks_model=True)

    def _bind(self, model: nn.Module, weights: Mapping[str, Weight], *, checks_model: bool) -> None:
        own = weakref.proxy(self)
        guard = Guard(
            check=partial(HiFT._check_update, own),
            begin=partial(HiFT._begin_change, own, "step()"),
            end=partial(HiFT._end_change, own),
        )
        self.turns = Turns(
            model, self.groups, weights, self._meter, self.param_groups, self.rotation, guard, checks_model=checks_model
        )
        """Turns of the groups over the model."""
        self.trained_weights = self.turns.trained_weights
        """Trained weights of all groups, bottom of the model first."""
        self._attach()

    def _attach(self) -> None:
        self.turns.attach()
        take(self._parameters_of_state(), self)
        self.is_detached = False  # also if the turn can't begin, so that `detach` takes everything off
        self.turns.activate()

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
        return self.turns.route.accumulating()

    @property
    def config(self) -> HiFTConfig:
        """Settings of this HiFT."""
        return self._config

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """2-norm of the last update's gradients before clipping, with `config.max_grad_norm`, else None."""
        return self.turns.route.norm

    @property
    def num_groups(self) -> int:
        """Number of groups (k)."""
        return len(self.groups)

    def weights_of(self, group: int) -> tuple[Weight, ...]:
        """Return the trained weights of a group.

        Args:
            group: Index of the group, bottom of the model first.
        """
        return self.turns.states[group].weights

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

    @override
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
        may_initialise = closure is None and not self.turns.hooks.has_brought_gradient() and self.has_gradient()
        if may_initialise and self._is_initialising():
            return None
        self._check_whole()
        if self.is_detached:
            raise RuntimeError("step() was called after detach(), which ended HiFT. Call reattach() to go on")
        loss = None
        if closure is not None:
            if not self.turns.route.takes_closures:
                raise RuntimeError(
                    "step(closure) would run the backward inside the step, and gradients='stepped' steps inside the "
                    "backward. Run the backward, then call step()"
                )
            with torch.enable_grad():
                loss = closure()
        self.turns.end_update()
        return loss

    def has_gradient(self) -> bool:
        """Return whether the active group has a gradient other than the zeros that a GradScaler is given."""
        return self.turns.hooks.has_gradient()

    def _check_step(self) -> None:
        """Refuse a step that the other ranks would not know of, or that is not HiFT's."""
        self._check_not_delegated()
        self._check_param_groups()
        if self.param_groups is not self.turns.param_groups:
            raise RuntimeError(
                "optimizer.param_groups was replaced by another list, and HiFT trains by the one that it was built "
                "with. Change the values in its groups instead (optimizer.param_groups[0]['lr'] = ...)"
            )
        if self._layout is None and world_size() > 1:
            raise RuntimeError(
                f"HiFT runs on {world_size()} ranks, and nothing averages their gradients. Prepare it "
                "with slivertune.prepare(accelerator, ...), slivertune.initialize(...) for bare DeepSpeed, or "
                "slivertune.attach(trainer, ...) for the Trainer"
            )
        if self._awaited is not None:
            self._check_awaited()
        self.turns.check_step()

    def _check_not_delegated(self) -> None:
        if self._engine is not None:
            raise RuntimeError(
                f"{self._engine} steps in HiFT's place. Step, save and load with the object that slivertune.prepare or "
                "slivertune.initialize returned"
            )

    def _check_update(self) -> None:
        self._check_step()
        self._check_whole()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False, since `GradScaler.step`, which asks first, must find the gradients and unscale them itself.

        Raises:
            RuntimeError: If `config.gradients` is not `device`, so that the gradients are gone by then.
        """
        if self.turns.route.refusal_of_scaler is not None:
            raise RuntimeError(self.turns.route.refusal_of_scaler)
        return False

    def detach(self, *, for_inference: bool = False) -> None:
        """End the rotation: let every parameter have gradients as before HiFT was built, and remove the hooks.

        Weights keep their trained values. `step` raises from now on; `reattach` continues. An engine keeps its own
        hooks on the model until `engine.destroy()`.

        Args:
            for_inference: With `weights="host"`, whether the blocks still come to the device for forwards without
                gradients (evaluation, generation), until the model is moved or cast or another HiFT is built over it.
                False leaves them on the host.
        """
        self._end_inference()
        if not self.is_detached:
            if self._engine is None:
                self.turns.detach()
            elif self._engine_turns is not None:
                self._engine_turns.detach()
            release(self._parameters_of_state(), self)
            self.is_detached = True
        if for_inference and self._engine is None:
            # It lasts longer than this optimizer: a function that trained the model may return it.
            self._end_inference = self.turns.parked.attach_for_inference(self.turns.hooks.model)

    def forget_held_lr(self) -> None:
        """Read the learning rate at the next step, in the middle of a cycle too, for instance from a new schedule."""
        self.rotation.held_lr = []

    @property
    def is_attached(self) -> bool:
        """Whether it trains the model: not between `detach` and `reattach`."""
        return not self.is_detached

    def reattach(self) -> None:
        """Continue after `detach`, with the same groups, masters and state.

        Raises:
            ValueError: If another optimizer trains a parameter of the model now.
            RuntimeError: If a parameter was replaced or cast meanwhile, or the engine was destroyed.
        """
        if not self.is_detached:
            return
        if self._engine is not None and self._engine_turns is None:
            raise RuntimeError(f"{self._engine}, which stepped in HiFT's place, was destroyed. Build a new HiFT")
        self._end_inference()
        hooks = self.turns.hooks
        check_free(hooks.model.named_parameters(), "HiFT")
        if hooks.checks_model:
            hooks.check()
        if self._engine_turns is None:
            self._attach()
        else:
            self._engine_turns.attach()
            take(self._parameters_of_state(), self)
            self.is_detached = False

    @override
    def check_built_over(self, model: nn.Module) -> None:
        parameters = set(model.parameters())
        for weight in self.trained_weights:
            if weight.trained not in parameters:
                raise ValueError(
                    f"the HiFT trains {weight.name} of another model than the one that was passed. Build it over this "
                    "model, before anything wraps or copies that"
                )

    def delegate_to(self, engine: str) -> None:
        """Let an engine step the groups in HiFT's place.

        Nothing is frozen or hooked any more. `step`, `state_dict` and `load_state_dict` raise from now on.

        Args:
            engine: Name of the engine, for messages.
        """
        self.turns.take_off()
        self._engine = engine

    def follow_engine(self, turns: EngineTurns | None) -> None:
        """Let `detach` and `reattach` act on the turns that an engine runs over the model.

        Args:
            turns: Turns of the engine. None if it was destroyed, which detaches HiFT for good.
        """
        if turns is None:
            self.detach()
        self._engine_turns = turns

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
        self.turns.take_off()
        release(self._parameters_of_state(), self)
        del self.turns  # which holds the parameters, too
        self.trained_weights = ()
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

    @override
    def whole_state(self) -> dict[str, Any]:
        self._check_no_update_is_open()
        state = {name: values for each in self.turns.states for name, values in each.export().items()}
        return {**self.state_header(state), "state": state}

    def state_by_group(self) -> Iterator[dict[str, WeightState]]:
        """Yield the state of each group as `whole_state` has it, bottom of the model first.

        With `state="disk"` its tensors are in host memory until the next group is requested, so that each file is read
        once and its checksum compared.

        Raises:
            RuntimeError: As in `whole_state`.
            OSError: With `state="disk"`, if a file can't be read or written.
        """
        self._check_no_update_is_open()
        for state in self.turns.states:
            yield state.export(lasts=False)
        self.turns.note_save()

    def state_header(self, names: Iterable[str]) -> dict[str, Any]:
        """Return everything in `whole_state` but the state of the weights.

        Args:
            names: Names of the weights that have state.
        """
        header = self._header()
        header["hift"]["weights"] = list(names)
        return {**header, "own": adapted_hyperparameters(self.turns.states)}

    def _check_no_update_is_open(self) -> None:
        self._check_not_delegated()
        self._check_whole()
        self.turns.route.check_closed()

    @property
    @override
    def has_own_files(self) -> bool:
        return self.turns.has_files

    def load_whole_state(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of `whole_state`. All tensors are copied to the storage that `config.state` names.

        Weights with an fp32 master in the state are set to it, rounded. Storage (`state`) and chunk size may differ
        from the saved run; model, groups, turns and base optimizer may not.

        Raises:
            ValueError: If the state is of another model, grouping or optimizer, or is damaged. Nothing is changed then.
        """
        self._check_not_delegated()
        self.turns.begin_load()
        check_header(state_dict, self._header())
        check_accepted(state_dict["param_groups"], self.param_groups, self.base)
        check_weights(state_dict["state"], self.trained_weights, self._meter)
        if self._half_done is not None:
            self.turns.route.drop(self.trained_weights)
        self._begin_change("load_state_dict()")
        load_hyperparameters(self.param_groups, state_dict["param_groups"])
        self.rotation.restore(state_dict["hift"])
        self.turns.load(state_dict["state"], state_dict.get("own", {}))
        self._end_change()
        if self.uses_sidecar:
            self._fill_placeholder()

    @override
    def _parameters_of_state(self) -> list[torch.nn.Parameter]:
        return [weight.trained for weight in self.trained_weights]

    def _header(self) -> dict[str, Any]:
        return make_header(self.identity(), self.rotation, self.param_groups, self.trained_weights)

    @override
    def unsupported(self, layout: Layout) -> str | None:
        return clash_with_layout(layout, self.base, self.config)

    @override
    def facts(self) -> dict[str, object]:
        facts = {"base optimizer": self.base.name, **super().facts(), "order of the groups": self.rotation.order}
        for group in self.groups:
            facts[f"group {group.index}"] = group.parameter_names
            for weight in self.weights_of(group.index):
                facts[weight.name] = (tuple(weight.trained.shape), str(weight.trained.dtype), weight.param_group)
        return facts

    @override
    def identity(self) -> dict[str, object]:
        return {
            "optimizer": self.base.name,
            "groups": [list(group.parameter_names) for group in self.groups],
            "order": [self.config.order, *self.rotation.order],
            "steps_per_group": self.rotation.steps_per_group,
            "waiting": self.config.waiting,
            "rounding": self.config.seed if self.config.master == "stochastic" else None,
        }
