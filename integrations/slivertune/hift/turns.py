"""The turns of HiFT's groups over one model: who is told what in its forwards, backwards and steps, and in which order.

A `Rotation` knows whose turn it is, `assemble` builds the parts, and `ModelHooks` hooks the model.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from slivertune.hift.assembly import assemble
from slivertune.hift.chunk import OwnHyperparameters, ParamGroups, Weight
from slivertune.hift.gradient_routes import Steps
from slivertune.hift.group_state import WeightState, restore_state
from slivertune.hift.host_room import HostRoom
from slivertune.hift.model_hooks import ModelHooks
from slivertune.hift.parts import Turn, Update, methods_by_moment
from slivertune.hift.probe import StepMeter
from slivertune.hift.rotation import Group, LearningRate, Rotation, scheduled_lr


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Functions of the optimizer that guard a change of weights and state."""

    check: Callable[[], None]
    """Refuse a step that must not be made."""
    begin: Callable[[], None]
    """Note that weights and state change from here on."""
    end: Callable[[], None]
    """Note that they are whole again."""


class Turns:
    """Turns of groups over one model, from `attach` to `detach`, or until it is dropped.

    Args:
        model: Model that holds the weights.
        groups: Groups of layers, by index.
        weights: Trained weights by name.
        meter: Meter of the base optimizer's steps, with HiFT's settings.
        param_groups: Param groups of the user's optimizer.
        rotation: Rotation of the groups.
        guard: Functions that guard a change. They do not keep the optimizer alive.
        checks_model: As in `ModelHooks`.

    Raises:
        ValueError: If a setting does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        weights: Mapping[str, Weight],
        meter: StepMeter,
        param_groups: ParamGroups,
        rotation: Rotation,
        guard: Guard,
        *,
        checks_model: bool,
    ) -> None:
        self._groups = groups
        self.param_groups = param_groups
        """Param groups, whose learning rates and hyperparameters a step reads."""
        self._rotation = rotation
        self._meter = meter
        self._guard = guard
        self._is_dropped_after_turn = meter.config.state == "discard"
        self._rates: list[LearningRate] = []
        """Learning rates of the current update, one per param group."""
        self._backward_listeners: list[Callable[[], None]] = []
        self.is_attached = False
        """Whether the model is hooked, and its weights are parked."""
        # Neither parts nor the model's hooks may keep this alive once the optimizer is dropped.
        own = weakref.proxy(self)
        steps = Steps(
            begin=partial(Turns._begin_update, own),
            begin_change=guard.begin,
            step=partial(Turns._step_weights, own),
            stepping=partial(Turns._stepping, own),
        )
        built = assemble(model, groups, weights, meter, param_groups, steps, rotation.coming_groups)
        self.states = built.states
        """Owners of the groups' masters and state, by index."""
        self.route = built.route
        """Route of gradients to the step."""
        self.parts = built.parts
        """All parts, in the order in which they are told."""
        self.parked = built.parked
        """Weights of the model's blocks in the forms and places that they have between turns."""
        self.state_sizes = built.sizes
        """Function that returns the bytes of each group's masters and state."""
        self.has_files = built.has_files
        """Whether groups' state is stored in files."""
        self._room: HostRoom | None = built.room
        """Room on the host, until it was taken before the first update."""
        self._told = methods_by_moment(built.parts)
        self.hooks = ModelHooks(
            model,
            [layer for group in groups for layer in group.layers],
            self.trained_weights,
            # Outputs keep it in memory, and may outlive the optimizer.
            [partial(_begin_backward, weakref.ref(self))],
            on_forward=partial(Turns._begin_forward, own),
            on_forward_end=partial(Turns._end_forward, own),
            on_lack_of_memory=partial(Turns._note_lack_of_memory, own),
            checks_model=checks_model,
            may_be_scaled=self.route.refusal_of_scaler is None,
        )
        """Hooks on the model."""

    @property
    def trained_weights(self) -> tuple[Weight, ...]:
        """Trained weights of all groups, bottom of the model first."""
        return tuple(weight for state in self.states for weight in state.weights)

    @property
    def compiles_steps(self) -> bool:
        """Whether steps in tiles are compiled (`HiFTConfig.compile_step`)."""
        return self._meter.is_compiled_on(self.trained_weights[0].device)

    def attach(self) -> None:
        """Put the hooks on the model, and park its weights. `activate` begins the turn of the active group."""
        with ExitStack() as attached:
            self.hooks.attach()
            attached.callback(self.hooks.release)
            for attach in self._told["attach"]:
                if (undo := attach(self.hooks.model)) is not None:
                    attached.callback(undo)
            # Also called when this is dropped.
            self.take_off = weakref.finalize(self, attached.pop_all().close)
            """Take everything off the model. A second call does nothing."""
        self.take_off.atexit = False
        self.is_attached = True

    def detach(self) -> None:
        """Release what is on the device for the turns to come, and take everything off the model."""
        for detach in self._told["detach"]:
            detach()
        self.take_off()
        if self.hooks.checks_model:
            self.hooks.free_successors()
        self.is_attached = False

    def activate(self) -> None:
        """Begin the turn of the active group, which alone has gradients unless the layers above it step, too."""
        active = self._rotation.active_group
        turn = Turn(active, self._rotation.coming_groups, self.states[active])
        for begin_turn in self._told["begin_turn"]:
            begin_turn(turn)
        self.hooks.activate(turn.state.weights, self.route.on_gradient, self.route.beside)

    def listen_to_backward(self, listener: Callable[[], None]) -> None:
        """Register a function to call when a backward of the model begins, whether or not it will reach the group.

        Args:
            listener: Function to call once inside of each backward.
        """
        self._backward_listeners.append(listener)

    def _begin_forward(self, inputs: Any) -> None:
        if self.is_attached:
            for begin_forward in self._told["begin_forward"]:
                begin_forward(inputs)

    def _end_forward(self, has_succeeded: bool) -> None:
        for end_forward in self._told["end_forward"]:
            end_forward(has_succeeded=has_succeeded)

    def _note_lack_of_memory(self) -> None:
        for out_of_memory in self._told["out_of_memory"]:
            out_of_memory()

    def check_step(self) -> None:
        """Let all parts check that the group can be stepped.

        Raises:
            OSError: If a file can't be written or read.
        """
        for check_step in self._told["check_step"]:
            check_step()

    def _begin_update(self) -> None:
        self._guard.check()  # stepped gradients change weights in the backward, before `step` checks
        rotation = self._rotation
        if self._room is not None:
            self._room.take()
            self._room = None
        update = Update(rotation.updates, rotation.to_apply(scheduled_lr(self.param_groups)))
        for begin_step in self._told["begin_step"]:
            begin_step(update)
        self.states[rotation.active_group].begin(stays=not rotation.ends_turn, update=update.number)
        self._rates = update.rates

    @torch.no_grad()
    def _step_weights(self, weights: Sequence[Weight]) -> None:
        self.states[self._rotation.active_group].step(weights, self.param_groups, self._rates)

    def _stepping(self) -> AbstractContextManager[None]:
        return self.hooks.stepping()

    def end_update(self) -> None:
        """Step the active group if gradients have reached it and have not stepped it, and pass the turn on."""
        rotation = self._rotation
        self.route.close()
        missed = self.hooks.end_update()
        is_stepped = self.route.collect()
        if not is_stepped and not missed:
            rotation.note_idle_step(self._groups)
            return
        if missed:
            rotation.warn_of_skip(self._groups, others_step=is_stepped)
        self._guard.begin()
        self._pass_on(is_stepped=is_stepped, is_reached=not missed)
        self._guard.end()
        rotation.warn_of_unreached(self._groups)

    def _pass_on(self, *, is_stepped: bool, is_reached: bool) -> None:
        """End an update, or a skipped one, and pass the turn on. The layers above may step in it alone."""
        rotation = self._rotation
        state = self.states[rotation.active_group]
        if is_stepped:
            state.end()
        self.route.end()
        if self._is_dropped_after_turn and rotation.ends_turn:
            state.discard()
        if is_stepped:
            rotation.advance(self._rates, is_reached=is_reached)
        else:
            rotation.skip(scheduled_lr(self.param_groups))
        if self.states[rotation.active_group] is not state:
            if not is_stepped:
                state.release()
            self.activate()
        ends_cycle = rotation.starts_cycle
        for end_step in self._told["end_step"]:
            if end_step(ends_cycle=ends_cycle):
                ends_cycle = False  # what the cycle has measured did not include the bytes that stay now

    def note_save(self) -> None:
        """Load again what reading the state of all groups has displaced."""
        for after_save in self._told["after_save"]:
            after_save()

    def begin_load(self) -> None:
        """End all copies, since the state to load may be the one that they write."""
        for before_load in self._told["before_load"]:
            before_load()

    def load(self, state: Mapping[str, WeightState], own: Mapping[int, OwnHyperparameters]) -> None:
        """Replace all weights and state, and begin the turn of the group that is active now.

        Args:
            state: State by weight, checked.
            own: Hyperparameters that instances of the base optimizer had adapted, by group.
        """
        for begin_load in self._told["begin_load"]:
            begin_load()
        restore_state(self.states, state, own)
        for after_load in self._told["after_load"]:
            after_load()
        if self.is_attached:
            self.activate()


def _begin_backward(own: weakref.ref[Turns]) -> None:
    """Tell the route and the listeners that a backward begins, unless the optimizer was dropped."""
    turns = own()
    if turns is not None:
        turns.route.begin_backward()
        for listener in turns._backward_listeners:
            listener()
