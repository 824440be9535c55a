"""HiFT's rotation on a DeepSpeed engine: one native ZeRO optimizer per group. The engine holds the active group's.

Over 350 lines, since one class keeps the state that must change together: the engine's optimizer, counters and turn.
"""

import functools
import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slivertune.core.copy_streams import CopyStreams, copy_streams
from slivertune.core.hyperparameters import (
    InnerGroups,
    Pushed,
    find_adapted,
    own_hyperparameters,
    push_hyperparameters,
    restore_adapted,
)
from slivertune.core.torch_internals import at_end_of_backward, mark_stepped, running_backward
from slivertune.hift import HiFT
from slivertune.hift.device_budget import share_out
from slivertune.hift.model_hooks import ModelHooks
from slivertune.hift.prefetch import PrefetchBudget
from slivertune.hift.rotation import LearningRate, scheduled_lr
from slivertune.parallel.consistency.explain import call_before, explain
from slivertune.parallel.consistency.headers import Header, Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.consistency.hift import applied_settings, header_of
from slivertune.parallel.zero.deepspeed_internals import new_zero_optimizer, note_step_without_update, set_owner
from slivertune.parallel.zero.engine import is_last_backward
from slivertune.parallel.zero.rank_file import PARAM_GROUP
from slivertune.parallel.zero.shares import clear_padding
from slivertune.parallel.zero.state_mover import StateMover, check_flat_memory

_numbers = itertools.count()
"""Counter that numbers the engines in this process, the same on every rank."""


def optimizer_of_group(optimizer: HiFT, group: int) -> torch.optim.Optimizer:
    """Build the base optimizer over one group's weights, with the hyperparameters of HiFT's param groups.

    Args:
        optimizer: HiFT.
        group: Index of the group.
    """
    weights = optimizer.weights_of(group)
    return optimizer.base.build(
        [
            {
                **own_hyperparameters(optimizer.param_groups[index]),
                PARAM_GROUP: index,
                "params": [weight.parameter for weight in weights if weight.param_group == index],
            }
            for index in sorted({weight.param_group for weight in weights})
        ]
    )


class GroupSchedule:
    """Gives the engine the ZeRO optimizer of the active group.

    The turn follows the engine's own counters of applied steps, which DeepSpeed saves. It changes right before a
    forward, of the engine or of the module itself, because the engine still reads its optimizer after stepping it.

    Args:
        engine: DeepSpeed's engine, built with `optimizer_of_group` of the first group, the others frozen.
        optimizer: HiFT; its groups, rotation and param groups are read, and its rotation is advanced.
        model: The engine's module.
    """

    def __init__(self, engine: Any, optimizer: HiFT, model: nn.Module) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.stage = int(engine.zero_optimization_stage())
        self.active = optimizer.active_group
        self.num_switches = 0
        self.switch_seconds = 0.0
        """Seconds spent in switches so far, including copies. Subtract `copy_seconds` to exclude them."""
        layers = [layer for group in optimizer.groups for layer in group.layers]
        self._hooks = ModelHooks(
            model,
            layers,
            optimizer.trained_weights,
            [self._note_backward],
            on_forward=self._begin_forward,
            on_late_backward=self._refuse_late_backward,
            on_lack_of_memory=self._note_lack_of_memory,
            checks_model=False,
            may_be_scaled=False,  # DeepSpeed has its own scaler, and no gradients on the parameters
        )
        self._hooks.attach()
        self._waits_on_host = optimizer.config.state == "host"
        self._streams: CopyStreams = copy_streams(torch.device(engine.device))
        # The engine may be dropped right after a forward, with copies to and from its memory in flight.
        weakref.finalize(self, self._streams.synchronize).atexit = False
        self._budget = PrefetchBudget(share_out(optimizer.config, lambda: 0)[0])
        self._most_leaving_bytes = 0
        """Peak bytes of the device that evicted groups held beside the next group's state in this cycle."""
        self._applied: list[LearningRate] = []
        self._heartbeat = Heartbeat(f"hift-zero-{next(_numbers)}")
        self._noted = -1
        self._has_run = self._is_reached = self._is_reached_now = False
        self._task = -1
        first = engine.optimizer
        if self.stage == 3:
            clear_padding(first)
        self.children: dict[int, Any] = {self.active: first}
        """ZeRO optimizer of each group."""
        self.movers = {self.active: StateMover(first, self.stage, self._streams)}
        """Mover of each group's masters and state."""
        self._park(self.active)
        for group in (g for g in range(optimizer.num_groups) if g != self.active):
            self._build(group, first)
        self._share_scaler()
        self._pushed: defaultdict[int, Pushed] = defaultdict(lambda: defaultdict(dict))
        """Hyperparameters that each group's optimizer was given last."""
        for group, child in self.children.items():
            child.optimizer.register_step_pre_hook(functools.partial(self._push_hyperparameters, group))
            if self.stage == 3:
                set_owner((weight.parameter for weight in optimizer.weights_of(group)), child)
        if self._waits_on_host:
            self.movers[self.active].to_device()
        self._activate(self.active)
        self.settle()
        self._engine_step = engine.step
        engine.step = self._step
        call_before(engine, "backward", self._check_attached)
        explain(engine, "backward", lambda: f"in the backward of group {self.active}", self._heartbeat)
        if self.stage == 3:
            explain(engine, "forward", lambda: f"gathering the weights for group {self.active}", self._heartbeat)

    @property
    def copy_seconds(self) -> float:
        """Seconds spent copying (on CUDA: queueing copies) in all switches so far."""
        return sum(mover.copy_seconds for mover in self.movers.values())

    def follow_counters(self, inputs: Any = None) -> None:
        """Activate the group that the engine's counters select. A local operation.

        Args:
            inputs: Inputs of the coming training forward, which decide how much state may be loaded before the old
                group's state is evicted; None if no training forward comes.
        """
        self._count()
        group = self.optimizer.active_group
        room_bytes = 0 if inputs is None else self._budget.begin_forward(group, inputs)
        if group == self.active:
            return
        start = time.perf_counter()
        self.children[self.active].zero_grad()
        self._change_places(self.active, group, room_bytes)
        self.switch_seconds += time.perf_counter() - start
        self.num_switches += 1

    def settle(self) -> None:
        """Wait until all groups' masters and state are in place and can be read there."""
        for mover in self.movers.values():
            mover.wait()
            mover.release()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the rotation to the position in a checkpoint. The engine's counters follow when it loads.

        Args:
            state: Result of `Rotation.state` in the saved run.
        """
        self.optimizer.rotation.restore(state)
        group = self.optimizer.active_group
        if group != self.active:
            self._change_places(self.active, group, 0)
        self.settle()

    def own_hyperparameters(self, group: int) -> list[dict[str, Any]]:
        """Return the hyperparameters that a group's optimizer itself has changed, by its own param groups."""
        adapted = find_adapted(self._inner_groups(group), self._pushed[group])
        return [adapted.get(inner[PARAM_GROUP], {}) for inner in self.children[group].optimizer.param_groups]

    def adopt(self, group: int, own: Sequence[dict[str, Any]]) -> None:
        """Adopt a group's optimizer whose state was loaded.

        Args:
            group: Index of the group.
            own: Its `own_hyperparameters` at saving.
        """
        indices = [inner[PARAM_GROUP] for inner in self.children[group].optimizer.param_groups]
        adapted = dict(zip(indices, own, strict=True))
        restore_adapted(self._inner_groups(group), self._pushed[group], self.optimizer.param_groups, adapted)
        if group != self.active and self._waits_on_host:
            self.movers[group].to_host()
            self.movers[group].release()
        elif group == self.active:
            self.movers[group].claim_device()
        self._share_scaler()

    def attach(self) -> None:
        """Freeze all groups but the active one, and hook the model, after `detach`."""
        self._hooks.attach()
        self._hooks.activate(self.optimizer.weights_of(self.active), self._note_gradient)

    def detach(self) -> None:
        """Unfreeze all groups, and remove HiFT's hooks from the model. The engine keeps its own until `destroy`."""
        self.settle()
        self._hooks.release()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Freeze inactive groups in the block, even after `detach`: DeepSpeed saves and loads frozen weights apart."""
        is_detached = self.optimizer.is_detached
        if is_detached:
            self.attach()
        try:
            yield
        finally:
            if is_detached:
                self.detach()

    def destroy(self) -> None:
        """Detach HiFT, and remove the inactive groups' hooks from the model.

        The engine itself destroys the active group's optimizer.
        """
        self.optimizer.follow_engine(None)
        for group, child in self.children.items():
            if group != self.active:
                child.destroy()

    def _build(self, group: int, first: Any) -> None:
        self._hooks.activate(self.optimizer.weights_of(group), lambda _: None)
        child = new_zero_optimizer(self.engine, optimizer_of_group(self.optimizer, group))
        if self.stage == 3:
            clear_padding(child)
            # Each optimizer brings its own hooks on every module, which would gather the weights once per group.
            child.parameter_offload.destroy()
            child.parameter_offload = first.parameter_offload
            child.persistent_parameters = first.persistent_parameters
            # It also brings its own bucket, but only one group at a time uses one.
            for dtype, bucket in child.ipg_buckets.items():
                bucket.buffer = first.ipg_buckets[dtype].buffer
        self.children[group] = child
        self.movers[group] = StateMover(child, self.stage, self._streams)
        self._park(group)

    def _share_scaler(self) -> None:
        """Let all groups use the active group's loss scaler, which a checkpoint replaces."""
        active = self.children[self.active]
        for child in self.children.values():
            child.loss_scaler = active.loss_scaler
            child.dynamic_loss_scale = active.dynamic_loss_scale

    def _park(self, group: int) -> None:
        """Offload a group's masters and state (with `state="host"`), and drop its gradients."""
        if self._waits_on_host:
            self.movers[group].to_host()
            self.movers[group].release()
        self.movers[group].drop_gradients()

    def _activate(self, group: int) -> None:
        """Begin the turn of a group whose masters and state are on the device, or in flight."""
        self._hooks.activate(self.optimizer.weights_of(group), self._note_gradient)
        self.movers[group].take_gradients()
        self.active = group
        self.engine.optimizer = self.children[group]
        self.engine.basic_optimizer = self.children[group].optimizer

    def _change_places(self, group: int, following: int, room_bytes: int) -> None:
        """Deactivate one group and activate another.

        Args:
            group: Group whose turn ends.
            following: Group whose turn begins.
            room_bytes: Device bytes that the second group's masters and state may take beside the first group's.
        """
        self.movers[group].drop_gradients()
        if self._waits_on_host:
            self._move(self.movers[group], self.movers[following], room_bytes)
        self._activate(following)

    def _move(self, leaving: StateMover, coming: StateMover, room_bytes: int) -> None:
        leaving.to_host()
        if coming.offloaded_bytes() <= room_bytes:
            try:
                coming.to_device()
            except torch.OutOfMemoryError:
                self._budget.fail()  # so it comes once the other group is evicted
            else:
                self._most_leaving_bytes = max(self._most_leaving_bytes, leaving.leaving_bytes())
                return
        coming.to_device(leaving)

    def _release(self) -> None:
        """Free the device memory of evicted groups."""
        for mover in self.movers.values():
            mover.release()

    def _note_lack_of_memory(self) -> None:
        self._budget.fail()
        self._release()

    def _begin_forward(self, inputs: Any) -> None:
        self._release()
        self.follow_counters(inputs)
        if inputs is not None:
            self._hooks.check()
            if self.stage < 3:
                check_flat_memory(self.children.values(), self.optimizer.trained_weights)
        if self.optimizer.rotation.steps != self._noted:
            self._noted = self.optimizer.rotation.steps
            self._heartbeat.enter(self.optimizer.updates, f"group {self.active}")

    def _count(self) -> None:
        updates = self.engine.global_steps - self.engine.skipped_steps
        rotation = self.optimizer.rotation
        if updates == rotation.updates:
            return
        rotation.advance(self._applied)
        if rotation.updates != updates:
            raise RuntimeError(
                f"the engine has applied {updates} steps, and HiFT {rotation.updates}. Load checkpoints by "
                "load_checkpoint of the engine that slivertune returned"
            )
        self._end_step()

    def _end_step(self) -> None:
        rotation = self.optimizer.rotation
        rotation.warn_of_unreached(self.optimizer.groups)
        self._budget.note_peak([self._streams.device])
        if rotation.starts_cycle:
            self._budget.end_cycle({self._streams.device: self._most_leaving_bytes})
            self._most_leaving_bytes = 0
            self._heartbeat.compare(
                {"updates": rotation.updates, "order": rotation.order, "held_lr": [str(lr) for lr in rotation.held_lr]},
                self._header(Stage.COMPARING, None),
            )

    def _header(self, stage: Stage, is_reached: bool | None) -> Header:
        return header_of(self.optimizer, stage, is_reached)._replace(group=self.active)

    def _note_backward(self) -> None:
        task = running_backward()
        if task != self._task:
            self._task, self._is_reached_now = task, False
            # After the last gradient, and before the engine sums the gradients.
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        """Check that the ranks have the same gradients to sum. DeepSpeed would hang, or sum different ones."""
        self._has_run = True
        if self.stage < 3 and not self._is_reached_now:
            self.children[self.active].setup_buckets()  # DeepSpeed does so at the first gradient, and always needs it
        if self.stage != 1 or is_last_backward(self.engine):
            reached = self._is_reached if self.stage == 1 else self._is_reached_now
            self._heartbeat.meet(self._header(Stage.GRADIENT_SYNC, reached))

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        self._note_backward()  # a loss of a submodule's output begins its backward above that output
        self._is_reached = self._is_reached_now = True

    def _refuse_late_backward(self) -> None:
        raise RuntimeError(
            f"this backward belongs to a forward that was made before the last step, and group {self.active} trains "
            "now: the forward has recorded no graph for it. Make each forward after the step of the update before"
        )

    def _check_attached(self) -> None:
        if self.optimizer.is_detached:
            raise RuntimeError(
                "the engine was to train after detach(), which ended HiFT. Call reattach() of the HiFT to go on, or "
                "engine.destroy() before another optimizer trains the model"
            )

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        self._check_attached()
        if self.active != self.optimizer.active_group:
            raise RuntimeError(
                f"group {self.optimizer.active_group} is to step, and HiFT has seen no forward since the turn of "
                f"group {self.active}. Make each forward after the step of the update before, and call the engine, its "
                "module or a submodule with several layers, not single layers alone"
            )
        self._release()
        if is_last_backward(self.engine):
            is_missed = self._has_run and not self._is_reached
            self._heartbeat.meet(self._header(Stage.STEPPING, self._is_reached), applied_settings(self.optimizer))
            self._has_run = self._is_reached = False
            if is_missed:
                self._skip()
                return None
            self.movers[self.active].follow_weights()
        with self._heartbeat.guard(f"stepping group {self.active}", computes=True):
            result = self._engine_step(*args, **kwargs)
        if self.engine.was_step_applied():
            self.movers[self.active].claim_device()
        self._count()
        return result

    def _skip(self) -> None:
        """Skip a step whose group has no gradient on any rank. The engine counts it as skipped."""
        engine, rotation = self.engine, self.optimizer.rotation
        rotation.warn_of_skip(self.optimizer.groups)
        rotation.skip(scheduled_lr(self.optimizer.param_groups))
        child = self.children[self.active]
        child.zero_grad()
        # Drops the zeros of its backward, to which the next backward would add.
        child.averaged_gradients = dict.fromkeys(child.averaged_gradients)
        note_step_without_update(engine)
        engine.skipped_steps += 1
        engine.global_steps += 1
        engine.micro_steps += 1
        engine.global_samples += engine.train_batch_size()
        mark_stepped(self.optimizer)
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.step()
        self._end_step()

    def _inner_groups(self, group: int) -> InnerGroups:
        # The engine may step them one by one.
        return [(inner, inner[PARAM_GROUP]) for inner in self.children[group].optimizer.param_groups]

    def _push_hyperparameters(self, group: int, stepping: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Inside the step, not before it: a cycle applies the schedule's learning rate at this time.
        outer_groups = self.optimizer.param_groups
        self._applied = self.optimizer.rotation.to_apply(scheduled_lr(outer_groups))
        push_hyperparameters(self._inner_groups(group), self._pushed[group], outer_groups, self._applied)
        # A torch schedule built over HiFT checks whether its optimizer has stepped.
        mark_stepped(self.optimizer)
