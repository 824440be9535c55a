"""Runs of HiFT on DeepSpeed inside a rank, and the same written plainly for one process on all ranks' rows."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import slivertune as st
from slivertune.parallel import prepare
from slivertune.parallel.initialize import initialize
from tests.helpers.models import VOCAB, tiny_llama
from tests.helpers.reference import naive_groups

ROWS = 2
LENGTH = 12
BUCKET = 3000
"""Elements of a reduce bucket: fewer than in any group, so that every group fills several."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run is of."""

    stage: int
    bare: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = 14
    accumulation: int = 1
    clip: float = 0.0
    layers_per_group: int = 1
    steps_per_group: int = 1
    order: Any = "bottom2up"
    state: Any = "host"
    tied: bool = False
    split_decay: bool = False
    checkpointing: bool | None = None
    """use_reentrant; None for no checkpointing."""
    accumulate_fp32: bool = False
    streamed_weights: bool = False
    """Whether the model is partitioned before HiFT sees it (zero.Init), and its weights wait on the CPU (stage 3)."""
    config_schedule: bool = False
    """Whether the schedule is DeepSpeed's own, from the config."""

    num_ranks: int = 2

    @property
    def has_one_order(self) -> bool:
        """Whether each sum of gradients has one order, as that of two ranks has."""
        return self.stage != 3 and self.accumulation == 1 and self.num_ranks <= 2

    @property
    def eps(self) -> float:
        # With 1e-8 the first steps of Adam turn the last bit of a sum in another order (stage 3's over ranks, any
        # over micro-batches) into a step of full size, wherever a gradient is nearly zero.
        return 1e-8 if self.has_one_order else 1e-4


def make_model(case: Case) -> nn.Module:
    # HiFT refuses weights in fp16; DeepSpeed casts them afterwards.
    dtype = torch.float32 if case.dtype == torch.float16 else case.dtype
    model = tiny_llama(dtype, blocks=4, tied=case.tied)
    if case.checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": case.checkpointing})  # type: ignore[operator]
    return model


def make_batch(update: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * update + 10 * micro + rank)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def factor(ticks: int) -> float:
    """The schedule: never zero, another value at every tick."""
    return 1 / (1 + 0.05 * ticks)


def warmup(ticks: int) -> float:
    """DeepSpeed's linear WarmupLR over 40 steps, from a tenth of the rate; its first tick changes nothing."""
    return 0.1 + 0.9 * min(1.0, max(0, ticks - 1) / 40)


LR = 1e-2
CAP, LOSS_CAP = 1e-4, 1e-6
"""What no limit on masters exceeds, and none on losses. A single gradient that is doubled changes
masters by 1.5e-3 and later losses by 2e-5; a rank that is left out once, by 8e-3 and 5e-4."""


def options(case: Case) -> dict[str, Any]:
    return {"lr": LR, "betas": (0.9, 0.95), "eps": case.eps, "weight_decay": 0.1}


def make_optimizer(model: nn.Module, case: Case) -> st.HiFT:
    config = st.HiFTConfig(
        layers_per_group=case.layers_per_group, steps_per_group=case.steps_per_group, order=case.order, state=case.state
    )
    if not case.split_decay:
        return st.HiFT(model, torch.optim.AdamW, config=config, **options(case))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    plain = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], **options(case))
    return st.HiFT.wrap(plain, model, config=config)


def engine_config(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": case.stage,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": 50000,
            "stage3_prefetch_bucket_size": 20000,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    if case.streamed_weights:
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": False}
    if case.dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if case.dtype == torch.float16:
        config["fp16"] = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 1000, "hysteresis": 1}
    if case.accumulate_fp32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if case.config_schedule:
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0.1 * LR,
                "warmup_max_lr": LR,
                "warmup_num_steps": 40,
                "warmup_type": "linear",
            },
        }
    return config


def quiet() -> None:
    """DeepSpeed without its minute of compiling, and without its log."""
    import logging

    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)


def make_accelerator(case: Case) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=engine_config(case)),
        gradient_accumulation_steps=case.accumulation,
    )


class Run:
    """A model, HiFT and an engine in one rank, trained by the loop that users write.

    Args:
        case: What to run.
        rank: This rank.
        num_ranks: All of them.
    """

    def __init__(self, case: Case, rank: int, num_ranks: int) -> None:
        from accelerate.utils import DummyScheduler

        quiet()
        self.case, self.rank, self.num_ranks = case, rank, num_ranks
        self.model = make_model(case)
        if case.streamed_weights:
            import deepspeed

            deepspeed.zero.Init(module=self.model, config_dict_or_path=engine_config(case))
        self.hift = make_optimizer(self.model, case)
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.losses: list[float] = []
        if case.bare:
            schedule: Any = None if case.config_schedule else functools.partial(LambdaLR, lr_lambda=factor)
            self.engine, self.optimizer, _, self.schedule = initialize(
                model=self.model, optimizer=self.hift, lr_scheduler=schedule, config=engine_config(case)
            )
            self.accelerator: Any = None
        else:
            self.accelerator = make_accelerator(case)
            made = DummyScheduler(self.hift) if case.config_schedule else LambdaLR(self.hift, factor)
            self.engine, self.optimizer, self.schedule = prepare(self.accelerator, self.model, self.hift, made)
        self.group_schedule = self.engine.hift_schedule
        self.backward_reached: set[int] = set()
        """Blocks through whose output backward has gone since this was last emptied."""
        for index, block in enumerate(self.model.model.layers):  # type: ignore[arg-type,union-attr]
            block.register_full_backward_pre_hook(lambda _, __, index=index: self.backward_reached.add(index))

    def train(self, steps: int, on_micro: Callable[[], None] | None = None) -> None:
        """Take some steps.

        Args:
            steps: How many.
            on_micro: Called after each micro-batch.
        """
        for _ in range(steps):
            update = self.hift.updates
            mean = torch.zeros(())
            for micro in range(self.case.accumulation):
                batch = make_batch(update, micro, self.rank)
                loss = self._bare(batch) if self.case.bare else self._accelerated(batch)
                mean += loss / self.case.accumulation
                if on_micro is not None:
                    on_micro()
            dist.all_reduce(mean)
            self.losses.append(mean.item() / self.num_ranks)

    def _bare(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        detached: torch.Tensor = loss.detach()
        return detached

    def _accelerated(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with self.accelerator.accumulate(self.engine):
            loss = self.engine(**batch).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        detached: torch.Tensor = loss.detach()
        return detached

    def masters(self) -> dict[str, torch.Tensor]:
        """Every fp32 master, gathered from the ranks, by name."""
        found: dict[str, torch.Tensor] = {}
        for child in self.group_schedule.children.values():
            found.update(self._stage3_masters(child) if self.case.stage == 3 else self._stage12_masters(child))
        return found

    def _gather(self, share: torch.Tensor) -> torch.Tensor:
        share = share.detach().contiguous()
        shares = [torch.empty_like(share) for _ in range(self.num_ranks)]
        dist.all_gather(shares, share)
        return torch.cat(shares)

    def _stage12_masters(self, child: Any) -> dict[str, torch.Tensor]:
        found = {}
        for index, share in enumerate(child.single_partition_of_fp32_groups):
            flat, offset = self._gather(share), 0
            for parameter in child.round_robin_bit16_groups[index]:
                part = flat[offset : offset + parameter.numel()]
                found[self.names[id(parameter)]] = part.view(parameter.shape).clone()
                offset += parameter.numel()
        return found

    def _stage3_masters(self, child: Any) -> dict[str, torch.Tensor]:
        found = {}
        for parameters, flat in zip(child.fp16_groups, child.fp32_partitioned_groups_flat, strict=True):
            offset = 0
            for parameter in parameters:
                size = parameter.partition_numel()
                whole = self._gather(flat.detach()[offset : offset + size])
                found[self.names[id(parameter)]] = whole[: parameter.ds_numel].view(parameter.ds_shape).clone()
                offset += size
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Every weight, gathered, by name."""
        import deepspeed

        parameters = dict(self.model.named_parameters())
        if self.case.stage != 3:
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def close(self) -> None:
        self.engine.destroy()
        if self.accelerator is not None:
            self.accelerator.free_memory()
        gc.collect()


@dataclass
class Trained:
    """What the reference came to."""

    masters: dict[str, torch.Tensor]
    losses: list[float]
    smallest_norm: float
    moments: dict[str, dict[str, torch.Tensor]]
    """By kind and name."""


def reference(case: Case, num_ranks: int, loss_scales: Sequence[float] | None = None) -> Trained:
    """HiFT as plainly as it can be: every rank's rows one after the other through a dense model, in one process.

    Args:
        case: What to run.
        num_ranks: Whose rows.
        loss_scales: For each update; fp16 gradients depend on it.
    """
    model = make_model(case)
    for parameter in model.parameters():
        # Buffers keep their dtype, as in the engine.
        parameter.data = parameter.data.to(case.dtype)
    parameters = dict(model.named_parameters())
    groups = naive_groups(model, case.layers_per_group)
    order = list(range(len(groups)))
    if case.order == "random":
        import random

        random.Random(0).shuffle(order)
    masters = {name: nn.Parameter(parameter.detach().float().clone()) for name, parameter in parameters.items()}
    optimizers = [torch.optim.AdamW(_split(case, masters, group), **options(case)) for group in groups]
    cycle = len(groups) * case.steps_per_group
    losses, norms = [], []
    for update in range(case.steps):
        active = order[update // case.steps_per_group % len(groups)]
        scale = loss_scales[update] if loss_scales is not None else 1.0
        gradients, loss = _mean_gradients(case, model, groups[active], update, num_ranks, scale)
        losses.append(loss)
        norms.append(math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values())))
        for name, gradient in gradients.items():
            # DeepSpeed adds 1e-6 to the norm.
            masters[name].grad = gradient / max((norms[-1] + 1e-6) / case.clip, 1.0) if case.clip else gradient
        ticks = update // cycle * cycle
        for group in optimizers[active].param_groups:
            if case.config_schedule:
                group["lr"] = LR * warmup(ticks)
            else:
                # accelerate's schedules tick once for every rank, as if they had been written for one.
                group["lr"] = LR * factor(ticks if case.bare else ticks * num_ranks)
        optimizers[active].step()
        with torch.no_grad():
            for name in groups[active]:
                masters[name].grad = None
                parameters[name].copy_(masters[name])
    state = {key: value for optimizer in optimizers for key, value in optimizer.state.items()}
    return Trained(
        masters={name: master.detach() for name, master in masters.items()},
        losses=losses,
        smallest_norm=min(norms),
        moments={
            kind: {name: state[master][kind] for name, master in masters.items() if master in state}
            for kind in ("exp_avg", "exp_avg_sq")
        },
    )


def _split(case: Case, masters: dict[str, nn.Parameter], names: list[str]) -> list[dict[str, Any]]:
    if not case.split_decay:
        return [{"params": [masters[name] for name in names]}]
    matrices = [masters[name] for name in names if masters[name].ndim >= 2]
    vectors = [masters[name] for name in names if masters[name].ndim < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def _mean_gradients(
    case: Case, model: nn.Module, names: list[str], update: int, num_ranks: int, scale: float
) -> tuple[dict[str, torch.Tensor], float]:
    """The mean over ranks and micro-batches, in fp32, of gradients that each rank has in the weights' dtype."""
    total = {name: torch.zeros_like(model.get_parameter(name), dtype=torch.float32) for name in names}
    loss_sum = 0.0
    for micro in range(case.accumulation):
        shares = []
        for rank in range(num_ranks):
            model.zero_grad()
            loss = model(**make_batch(update, micro, rank)).loss
            (loss.float() / case.accumulation * scale).backward()
            loss_sum += loss.item() / (case.accumulation * num_ranks)
            shares.append({name: model.get_parameter(name).grad.clone() for name in names})  # type: ignore[union-attr]
        for name in names:
            total[name] += sum(share[name] / num_ranks for share in shares).float() / scale
    model.zero_grad()
    return total, loss_sum


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference over all elements of two dictionaries with the same names."""
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    return max((left[name].float() - right[name].float()).abs().max().item() for name in left)
