"""Runs of HiFT: what they are of, what a rank has at their end, and the same in one process on all ranks' rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from slivertune import HiFT, HiFTConfig
from slivertune.core.layout import Layout
from tests.helpers.accelerator import pretends_cuda
from tests.helpers.models import BLOCKS, assert_same_tree, differing, tiny_llama
from tests.helpers.reference import decay_split, grouped_optimizer, naive_groups
from tests.helpers.tolerance import assert_step_close, exact_sums
from tests.parallel.contract.runs import ZERO, Case, Run
from tests.parallel.reference import ADAMW, OneProcess, after_two_ranks, halving, whole_weights

CYCLE = BLOCKS + 2
"""Groups of one layer each: embedding, blocks, head. The 97 words do not divide by two or three ranks."""


@dataclass(frozen=True, kw_only=True)
class HiFTCase(Case):
    """A run of HiFT with AdamW, over two cycles and a step."""

    cut: ClassVar[int] = 7
    """Into the second cycle."""
    more: ClassVar[int] = CYCLE

    updates: int = 2 * CYCLE + 1
    eps: float = ADAMW["eps"]
    is_scheduled: bool = True
    split_decay: bool = False
    streamed_weights: bool = False
    """Whether the model is partitioned before HiFT sees it (zero.Init), and its weights wait on the CPU (stage 3)."""
    config_schedule: bool = False
    """Whether the schedule is DeepSpeed's own, from the config."""

    def build_model(self, seed: int = 0) -> nn.Module:
        model = super().build_model(seed)
        if self.streamed_weights:
            import deepspeed

            deepspeed.zero.Init(module=model, config_dict_or_path=self.engine_config(3))
        return model

    def build_optimizer(self, model: nn.Module, **changes: Any) -> HiFT:
        config = HiFTConfig.paper(**{**self.settings, **changes})
        options = {**ADAMW, "eps": self.eps}
        if not self.split_decay:
            return HiFT(model, torch.optim.AdamW, config=config, **options)
        return HiFT.wrap(
            grouped_optimizer(model, torch.optim.AdamW, decay_split(model), **options), model, config=config
        )

    def schedule_of(self, optimizer: HiFT) -> list[Any]:
        if not self.is_scheduled:
            return []
        if not self.config_schedule:
            return [functools.partial(LambdaLR, lr_lambda=halving) if self.bare else LambdaLR(optimizer, halving)]
        from accelerate.utils import DummyScheduler

        return [] if self.bare else [DummyScheduler(optimizer)]

    def engine_config(self, stage: int) -> dict[str, Any]:
        config = super().engine_config(stage)
        if self.streamed_weights:
            config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": False}
        if self.config_schedule:
            config["scheduler"] = {"type": "WarmupLR", "params": WARMUP}
        return config

    def result(self, run: Run) -> dict[str, Any]:
        return {
            "weights": whole_weights(run.model),
            "masters": masters_of(run),
            "state": state_of(run),
            "whole state": whole_state_of(run),
            "active group": active_group(run),
            "held": [float(rate) for rate in run.sliver.held_lr],
            "shown": [group["lr"] for group in run.optimizer.param_groups],
            **super().result(run),
        }

    def merged(self, run: Run) -> dict[str, torch.Tensor]:
        return whole_weights(run.model)

    @property
    def master(self) -> str:
        return str(self.settings.get("master", "fp32"))

    def has_one_order(self, layout: Layout, num_ranks: int = 2) -> bool:
        """Whether each sum of gradients has one order, as a mean of two has, and a norm that is not over shards."""
        if layout in ZERO:
            return layout != "zero3" and self.accumulation == 1 and num_ranks <= 2
        return num_ranks <= 2 and (layout == "ddp" or self.clip is None)

    def assert_equals_one_process(self, results: list[dict[str, Any]], layout: Layout) -> None:
        num_ranks = len(results)
        expected = reference(self, layout, num_ranks)
        weights, before = whole_weights(expected.model), whole_weights(self.build_reference_model())
        masters = {name: master.detach().cpu() for name, master in expected.masters.items()}
        least = 1e-3 * min(1.0, 1e-4 / self.eps)
        still = [name for name in before if float((weights[name].float() - before[name].float()).abs().max()) < least]
        assert not still, f"never updated: {still}"
        assert self.clip is None or min(expected.norms) > self.clip, "nothing was clipped"
        for result in results:
            assert result["updates"] == self.updates
            assert bool(result["masters"]) == (layout in ZERO or (self.dtype, self.master) == (torch.bfloat16, "fp32"))
            rounded = {name: (first, rows.to(self.dtype)) for name, (first, rows) in result["masters"].items()}
            assert differing_rows(rounded, result["weights"]) == []
        losses = _mean_losses(results, self.accumulation)
        if self.has_one_order(layout, num_ranks):
            for result in results:
                assert differing(result["weights"], weights) == []
                assert differing_rows(result["masters"], masters) == []
                assert not self.clip or result["norms"] == expected.norms
            if self.mixed_precision == "no":
                assert losses == pytest.approx(expected.losses, rel=1e-15)
            return
        exact = reference(self, layout, num_ranks, exact=True)
        is_mixed = self.mixed_precision != "no"
        cap = 2e-3 if is_mixed else CAP
        for result in results:
            if self.dtype == torch.float32:
                assert_step_close(result["weights"], weights, whole_weights(exact.model), cap=cap)
            if layout in ZERO:
                assert_step_close(
                    {name: rows for name, (_, rows) in result["masters"].items()},
                    masters,
                    {n: m.detach().cpu() for n, m in exact.masters.items()},
                    cap=cap,
                )
            if self.clip:
                assert_step_close(result["norms"], expected.norms, exact.norms, cap=1e-3 if is_mixed else 1e-5)
        if not is_mixed:
            assert_step_close(losses, expected.losses, exact.losses, cap=LOSS_CAP)

    def assert_resumed(self, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
        assert (loaded["updates"], loaded["active group"]) == (self.cut, self.cut % CYCLE)
        assert loaded["held"] == saved["held"] and loaded["shown"] == saved["shown"]
        assert differing(loaded["weights"], saved["weights"]) == []
        assert_same_tree(loaded["whole state"], saved["whole state"])
        if saved["whole state"]:
            assert self.master != "fp32" or saved["whole state"]["master"].keys() == saved["weights"].keys()
            assert any(bool(each.any()) for each in saved["whole state"]["exp_avg"].values())

    def assert_continued(self, results: list[dict[str, Any]], before: int) -> None:
        compute = functools.partial(
            _after_two_ranks,
            len(results),
            self.cut + self.more,
            self.dtype,
            is_bare=self.bare,
            split_decay=self.split_decay,
            master=self.master,
            eps=self.eps,
        )
        expected = compute(exact=False)
        for result in results:
            assert result["updates"] == self.cut + self.more
            if len(results) <= 2 and not self.bare:
                assert differing(result["weights"], expected) == []
            else:
                # Three thirds are summed in another order than the reference's, and so are the parts of ZeRO-3.
                assert_step_close(result["weights"], expected, compute(exact=True), cap=CAP)

    def build_reference_model(self) -> nn.Module:
        """The whole model in the dtype in which it is trained, where this process trains."""
        model = HiFTCase(dtype=self.dtype, tied=self.tied).build_model().to("cuda" if pretends_cuda() else "cpu")
        for parameter in model.parameters():
            # Buffers keep their dtype, as in DeepSpeed's engine. What accelerate's mixed precision lifts, the first
            # forward pass rounds down again.
            parameter.data = parameter.data.to(self.dtype if self.mixed_precision == "no" else torch.float32)
        return model


CAP, LOSS_CAP = 1e-4, 1e-6
"""What no limit on weights and masters exceeds, and none on losses. A single gradient that is doubled changes masters
by 1.5e-3 and later losses by 2e-5; a rank that is left out once, by 8e-3 and 5e-4. Where a norm over shards is in
another order and weights are rounded to bf16 for the forward pass, one of them may be rounded the other way: 2e-3; an
unclipped run is off by 2e-2, and its norms by 1e-2."""


def moments_of(trained: OneProcess) -> dict[str, dict[str, torch.Tensor]]:
    """The state of one process, by kind and name."""
    state = {key: value for optimizer in trained.rotation.inner.values() for key, value in optimizer.state.items()}
    return {
        kind: {name: state[master][kind] for name, master in trained.masters.items() if master in state}
        for kind in ("exp_avg", "exp_avg_sq")
    }


def differing_rows(rows: Rows, whole: dict[str, torch.Tensor]) -> list[str]:
    """Names of whose whole tensor the rows have other bits."""
    return differing(
        {name: values for name, (_, values) in rows.items()},
        {name: whole[name][first : first + len(values)] for name, (first, values) in rows.items()},
    )


def _mean_losses(results: list[dict[str, Any]], accumulation: int) -> list[float]:
    """The mean of each update's losses over ranks and micro-batches."""
    micros = [sum(losses) / len(losses) for losses in zip(*(result["losses"] for result in results), strict=True)]
    return [sum(micros[at : at + accumulation]) / accumulation for at in range(0, len(micros), accumulation)]


LR = ADAMW["lr"]
WARMUP = {"warmup_min_lr": 0.1 * LR, "warmup_max_lr": LR, "warmup_num_steps": 40, "warmup_type": "linear"}


def rate_after(updates: int, *, is_warmup: bool, ticks: int) -> float:
    """The factor of the learning rate.

    Args:
        updates: Those that are done.
        is_warmup: Whether DeepSpeed's linear WarmupLR gives it: over 40 steps, from a tenth, and its first tick changes
            nothing.
        ticks: Of any other schedule in an update: accelerate's tick once for every rank, as if written for one.
    """
    return 0.1 + 0.9 * min(1.0, max(0, updates - 1) / 40) if is_warmup else halving(updates * ticks)


Rows = dict[str, tuple[int, torch.Tensor]]
"""Whole tensors or some of their rows, by name, with the first row's number."""


def masters_of(run: Run) -> Rows:
    """The fp32 masters: whole under ZeRO, gathered by every rank together; elsewhere those that HiFT holds here."""
    if run.layout in ZERO:
        return {name: (0, master) for name, master in gathered(run.model).items()}
    state = run.sliver.whole_state()["state"]
    return {
        name: (getattr(weight, "first_row", 0), state[name]["master"].clone())
        for group in run.sliver.groups
        for name, weight in zip(group.parameter_names, run.sliver.weights_of(group.index), strict=True)
        if "master" in state.get(name, {})
    }


def state_of(run: Run) -> dict[str, torch.Tensor]:
    """What this rank has of all groups' state."""
    if run.layout not in ZERO:
        return {
            f"{name}/{key}": value
            for name, values in run.sliver.whole_state()["state"].items()
            for key, value in values.items()
        }
    schedule = run.model.hift_schedule
    return {
        f"{group}.{index}/{key}": value.clone()
        for group, child in schedule.children.items()
        for index, master in enumerate(schedule.movers[group].masters)
        for key, value in child.optimizer.state[master].items()
    }


def whole_state_of(run: Run) -> dict[str, Any]:
    """Under ZeRO, all groups' masters and state, put together from the ranks."""
    if run.layout not in ZERO:
        return {}
    steps = {
        group: sorted({float(state["step"]) for state in child.optimizer.state.values() if "step" in state})
        for group, child in run.model.hift_schedule.children.items()
    }
    return {"steps": steps, **{key: gathered(run.model, key) for key in ("master", "exp_avg", "exp_avg_sq")}}


def active_group(run: Run) -> int:
    """The group whose turn it is, as the engine has it under ZeRO."""
    return run.model.hift_schedule.active if run.layout in ZERO else run.sliver.active_group


def gathered(engine: Any, key: str = "master") -> dict[str, torch.Tensor]:
    """The masters of all groups on DeepSpeed, or one kind of their state, put together from the ranks, by name."""
    schedule = engine.hift_schedule
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for group, child in schedule.children.items():
        parts = child.fp16_groups if schedule.stage == 3 else child.round_robin_bit16_groups
        for master, parameters in zip(schedule.movers[group].masters, parts, strict=True):
            flat = master if key == "master" else child.optimizer.state[master].get(key)
            if flat is None:
                continue
            share = flat.detach().contiguous().to(engine.device)
            shares = [torch.empty_like(share) for _ in range(dist.get_world_size())]
            dist.all_gather(shares, share)
            whole, offset = torch.stack(shares), 0
            for parameter in parameters:
                if schedule.stage == 3:
                    size, shape = parameter.partition_numel(), parameter.ds_shape
                    values = whole[:, offset : offset + size].flatten()
                else:
                    size, shape = parameter.numel(), parameter.shape
                    values = whole.flatten()[offset : offset + size]
                found[names[id(parameter)]] = values[: shape.numel()].view(shape).clone()
                offset += size
    return found


def reference(
    case: HiFTCase, layout: Layout, num_ranks: int = 2, *, exact: bool = False, scales: tuple[float, ...] | None = None
) -> OneProcess:
    """One process after the whole of a case, which is computed once for all layouts on which it is the same.

    Args:
        case: What to run.
        layout: Where the ranks run it.
        num_ranks: Whose rows.
        exact: With exact sums.
        scales: Of the losses.
    """
    settings = case.settings
    groups = naive_groups(tiny_llama(torch.float32, tied=case.tied), settings.get("layers_per_group", 1))
    if settings.get("order") == "random":
        import random

        random.Random(0).shuffle(groups)
    # What decides on the result, and nothing else, is the key.
    return _trained(
        HiFTCase(updates=case.updates, dtype=case.dtype, tied=case.tied, mixed_precision=case.mixed_precision),
        tuple(map(tuple, groups)),
        exact,
        ranks=num_ranks,
        accumulation=case.accumulation,
        max_norm=case.clip,
        steps_per_group=settings.get("steps_per_group", 1),
        master=case.master,
        is_warmup=case.config_schedule,
        ticks=1 if case.bare else num_ranks,
        compute_dtype=torch.bfloat16 if case.mixed_precision == "bf16" else None,
        as_zero=layout in ZERO and (case.accumulation > 1 or scales is not None),
        scales=scales,
        split_decay=case.split_decay,
        eps=case.eps,
    )


@functools.cache
def _after_two_ranks(*args: Any, exact: bool, **options: Any) -> dict[str, torch.Tensor]:
    with exact_sums() if exact else nullcontext():
        return after_two_ranks(*args, **options)


@functools.cache
def _trained(
    case: HiFTCase, groups: tuple[tuple[str, ...], ...], exact: bool, *, is_warmup: bool, ticks: int, **options: Any
) -> OneProcess:
    options["lr_of"] = functools.partial(rate_after, is_warmup=is_warmup, ticks=ticks)
    with exact_sums() if exact else nullcontext():
        return OneProcess(case.build_reference_model(), groups, **options).run(case.updates)
