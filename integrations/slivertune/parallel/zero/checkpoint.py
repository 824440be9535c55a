"""Checkpoints of a DeepSpeed engine that HiFT rotates: DeepSpeed's files, and one extra file per rank.

DeepSpeed writes the model, its counters and schedule, and the optimizer of the active group. The rank's extra file has
the rotation and the rank's share of every group's masters and state. It also records the elements of each parameter in
that share, so that any number of ranks can assemble its own shares.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.atomic import atomic_file
from slivertune.core.hyperparameters import load_hyperparameters, own_hyperparameters
from slivertune.hift.checkpoint import check_identity
from slivertune.parallel.consistency.explain import call_before
from slivertune.parallel.consistency.heartbeat import check_agreement
from slivertune.parallel.zero.deepspeed_internals import (
    fill_frozen,
    follow_master,
    load_first,
    masters_listed,
    never_exclude,
)
from slivertune.parallel.zero.rank_file import VERSION, check_fits, file_name, read_rank_file, saved_ranks
from slivertune.parallel.zero.schedule import GroupSchedule
from slivertune.parallel.zero.shares import SavedShares, ShareFragment, identity, pieces_of


class Checkpoints:
    """Saves and loads all groups through the engine's own methods, which it overrides on this engine only.

    Args:
        schedule: The rotation on the engine.
    """

    def __init__(self, schedule: GroupSchedule) -> None:
        self._schedule = schedule
        engine = schedule.engine
        self._engine_save, self._engine_load = engine.save_checkpoint, engine.load_checkpoint
        engine.save_checkpoint = schedule.attached()(self._save)
        engine.load_checkpoint = schedule.attached()(self._load)
        # Inactive groups are frozen, but must not be left out.
        never_exclude(engine, lambda: [weight.trained for weight in schedule.optimizer.trained_weights])
        call_before(engine, "destroy", schedule.destroy)

    def _save(self, save_dir: str, tag: str, **options: Any) -> Any:
        """Save as DeepSpeed does, with all arguments that `seal_engine` passes. A collective."""
        schedule = self._schedule
        schedule.follow_counters()
        schedule.settle()
        for mover in schedule.movers.values():
            mover.follow_weights()
        folder = Path(save_dir) / tag
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            for path in folder.glob("slivertune_hift_rank_*_of_*.pt"):
                # Of an older checkpoint under this name, saved by another number of ranks.
                if not path.stem.endswith(f"_of_{dist.get_world_size()}"):
                    path.unlink()
        # Before DeepSpeed's own save, which ends by pointing "latest" to the folder.
        with atomic_file(folder / file_name(dist.get_rank(), dist.get_world_size())) as temporary:
            torch.save(self._export(), temporary)
        return self._engine_save(save_dir, tag, **options)

    def _load(
        self,
        load_dir: str,
        tag: str | None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Load as DeepSpeed does. A collective.

        Raises:
            ValueError: If the checkpoint is not HiFT's, or has other groups; on all ranks, before anything is changed.
        """
        schedule = self._schedule
        rest = {
            "load_module_strict": load_module_strict,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "custom_load_fn": custom_load_fn,
        }
        if tag is None:
            return self._engine_load(load_dir, tag, **rest)
        folder = Path(load_dir) / tag
        if load_module_only:
            return self._load_weights(folder, rest)
        saved = self._read(folder)
        schedule.restore(saved)
        load_hyperparameters(schedule.optimizer.param_groups, saved["param_groups"])
        num_saved = saved_ranks(folder)
        if num_saved is not None and num_saved != dist.get_world_size():
            return self._load_from_others(folder, num_saved, load_optimizer_states, rest)
        loaded = self._engine_load(load_dir, tag, load_optimizer_states=load_optimizer_states, **rest)
        if not load_optimizer_states:
            for child in schedule.children.values():
                child.refresh_fp32_params()
            return loaded
        for group in schedule.children:
            if str(group) in saved["groups"]:
                exported = saved["groups"][str(group)]
                self._import(group, exported["masters"], exported["optimizer"])
            schedule.adopt(group, saved["own"][str(group)])
        return loaded

    def _load_weights(self, folder: Path, rest: Mapping[str, Any]) -> Any:
        """Load the weights alone. The masters follow them, and the turn stays."""
        schedule = self._schedule
        turn = schedule.optimizer.rotation.state()
        saved = None
        if schedule.stage > 1 and saved_ranks(folder) == dist.get_world_size():
            # DeepSpeed's files have frozen weights apart, and load those that are frozen now.
            saved = self._read(folder)
            schedule.restore(saved)
        try:
            loaded = self._engine_load(str(folder.parent), folder.name, load_module_only=True, **rest)
            for child in schedule.children.values():
                child.refresh_fp32_params()
            if saved is not None and schedule.stage == 3:  # whose trained weights come from masters alone
                self._import(schedule.active, saved["active"]["masters"], None)
                schedule.movers[schedule.active].claim_device()
        finally:
            if saved is not None:
                schedule.restore(turn)
        return loaded

    def _load_from_others(self, folder: Path, num_saved: int, load_states: bool, rest: Mapping[str, Any]) -> Any:
        """Load a checkpoint of another number of ranks. Assemble each share from all of their files."""
        schedule = self._schedule
        shares = SavedShares(folder, num_saved)
        zero: Any = schedule.engine.optimizer
        if schedule.stage == 3:
            zero.checkpoint_event_prologue()
        loaded = load_first(schedule.engine, folder, **rest)
        schedule.follow_counters()
        schedule.settle()
        for name, value in shares.first["scaler"].items():
            setattr(schedule.children[schedule.active].loss_scaler, name, value)
        for group in schedule.children:
            self._fill(group, shares, load_states)
            own = shares.first["own"][str(group)]
            schedule.adopt(group, own if load_states else [{} for _ in own])
        if schedule.stage == 3:
            trained = {id(each.parameter) for each in schedule.optimizer.trained_weights}
            fill_frozen(schedule.engine, folder, num_saved, trained)
            zero.checkpoint_event_epilogue()
        return loaded

    def _fill(self, group: int, shares: SavedShares, load_states: bool) -> None:
        schedule = self._schedule
        schedule.movers[group].to_device()
        # Elements outside all fragments are padding, which stays unchanged.
        masters = [master.detach().cpu().clone() for master in schedule.movers[group].masters]
        filled = [shares.fill(group, own, each) for each, own in zip(masters, self._pieces(group), strict=True)]
        state: dict[str, Any] | None = None
        if load_states:
            exported = shares.first["groups"].get(str(group), shares.first["active"])
            param_groups = self._export_group(group)["optimizer"]["param_groups"]
            load_hyperparameters(param_groups, exported["optimizer"]["param_groups"])
            state = {"state": {index: each for index, each in enumerate(filled) if each}, "param_groups": param_groups}
        self._import(group, masters, state)

    def _pieces(self, group: int) -> list[list[ShareFragment]]:
        return pieces_of(self._schedule.children[group], self._schedule.stage, self._names())

    def _names(self) -> dict[int, str]:
        return {id(each): name for name, each in self._schedule.engine.module.named_parameters()}

    def _export(self) -> dict[str, Any]:
        schedule, names = self._schedule, self._names()
        waiting = [group for group in schedule.children if group != schedule.active]
        return {
            "version": VERSION,
            "identity": self._identity(),
            **schedule.optimizer.rotation.state(),
            "param_groups": [own_hyperparameters(group) for group in schedule.optimizer.param_groups],
            "groups": {str(group): self._export_group(group) for group in waiting},
            # DeepSpeed's files have it too, in a form that only the same number of ranks can read.
            "active": self._export_group(schedule.active),
            "pieces": {
                str(group): [list(map(tuple, each)) for each in self._pieces(group)] for group in schedule.children
            },
            "shapes": {
                str(group): {
                    names[id(each.parameter)]: list(getattr(each.parameter, "ds_shape", each.parameter.shape))
                    for each in schedule.optimizer.weights_of(group)
                }
                for group in schedule.children
            },
            "scaler": {
                name: value
                for name, value in vars(schedule.children[schedule.active].loss_scaler).items()
                if isinstance(value, (bool, int, float))
            },
            "own": {str(group): schedule.own_hyperparameters(group) for group in schedule.children},
        }

    def _export_group(self, group: int) -> dict[str, Any]:
        schedule = self._schedule
        with masters_listed(schedule.children[group], schedule.stage) as optimizer:
            masters = [master.detach() for master in schedule.movers[group].masters]
            return {"optimizer": optimizer.state_dict(), "masters": masters}

    def _import(self, group: int, masters: Sequence[torch.Tensor], state: dict[str, Any] | None) -> None:
        schedule = self._schedule
        mover, child = schedule.movers[group], schedule.children[group]
        # Torch loads state to the weights' device, and some of it (a fused step count) must be on the GPU.
        mover.to_device()
        mover.wait()
        if state is not None:
            with masters_listed(child, schedule.stage) as optimizer:
                optimizer.load_state_dict(state)
        for index, (master, value) in enumerate(zip(mover.masters, masters, strict=True)):
            master.data.copy_(value)
            if schedule.stage == 3:
                # DeepSpeed restores these weights as frozen ones, unless the checkpoint left them out.
                follow_master(child, index)

    def _read(self, folder: Path) -> dict[str, Any]:
        """Read this rank's file. All ranks fail together if one can't read its own."""
        try:
            saved = self._checked(folder)
        except ValueError as error:
            with suppress(ValueError):  # a rank's own error is clearer than the disagreement
                check_agreement({"the checkpoint": str(error)})
            raise
        check_agreement({"the checkpoint": "readable"})
        return saved

    def _checked(self, folder: Path) -> dict[str, Any]:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        num_saved = saved_ranks(folder)
        if num_saved is None:
            raise ValueError(
                f"{folder} has no {file_name(rank, num_ranks)}: it was not saved by HiFT on DeepSpeed. Name another"
            )
        # This number is the same in all ranks' files.
        whose = rank if num_saved == num_ranks else 0
        saved = read_rank_file(folder, whose, num_saved)
        path = folder / file_name(whose, num_saved)
        check_identity(path, saved["identity"], self._identity(), built="the optimizer and the config")
        check_fits(path, saved, self._schedule.optimizer)
        if num_saved != num_ranks:
            return saved
        for group, mover in self._schedule.movers.items():
            theirs = saved["groups"].get(str(group), saved["active"])["masters"]
            pieces = [[ShareFragment(*each) for each in one] for one in saved["pieces"].get(str(group), ())]
            is_same = [each.shape for each in theirs] == [each.shape for each in mover.masters]
            if not is_same or pieces != self._pieces(group):
                raise ValueError(
                    f"{path} has other shares of group {group} than this rank. Build model, optimizer and config with "
                    "the settings of the saved run, or use another checkpoint"
                )
        return saved

    def _identity(self) -> dict[str, Any]:
        return {"stage of ZeRO": self._schedule.stage, **identity(self._schedule.optimizer)}
