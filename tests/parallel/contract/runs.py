"""Runs on ranks: a case of a method, under any layout on CPUs, by the loop that users write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import send_to_device
from torch import nn

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.layout import Layout
from tests.helpers.accelerator import forgotten, one_device
from tests.helpers.models import tiny_llama
from tests.parallel.reference import batch_of, on_fsdp2_ranks

ZERO: tuple[Layout, ...] = ("zero1", "zero2", "zero3")
LAYOUTS: tuple[Layout, ...] = ("ddp", "fsdp2", *ZERO)
BUCKET = 3000
"""Elements of a reduce bucket under ZeRO: fewer than in any group of HiFT, so that every group fills several."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run is of; those of the methods say more."""

    cut: ClassVar[int]
    """Updates after which a run is saved, where that is tested."""
    more: ClassVar[int]
    """Updates of another number of ranks from there."""

    updates: int = 12
    dtype: torch.dtype = torch.float32
    mixed_precision: str = "no"
    accumulation: int = 1
    clip: float | None = None
    tied: bool = False
    checkpointing: bool | None = None
    """`use_reentrant` of gradient checkpointing; None for none."""
    bare: bool = False
    """Whether DeepSpeed's engine is built by `slivertune.initialize` and stepped by itself."""
    evaluate: bool = False
    """Whether the model is asked for a loss without a gradient before and after each step, as an evaluation does."""
    plugin: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """More of FSDP2's plugin."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of the method's config."""
    engine: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """More of DeepSpeed's config."""

    @property
    def blocks_of_fsdp2(self) -> list[str]:
        """Classes of the modules that FSDP2 shards one by one."""
        return ["LlamaDecoderLayer"]

    @property
    def max_norm(self) -> float | None:
        """What the loop clips at; None where it asks for no norm."""
        return self.clip

    def build_model(self, seed: int = 0) -> nn.Module:
        # HiFT refuses weights in fp16; DeepSpeed casts them afterwards.
        model: Any = tiny_llama(torch.float32 if self.dtype == torch.float16 else self.dtype, tied=self.tied, seed=seed)
        if self.checkpointing is not None:
            enable_checkpointing(model, {"use_reentrant": self.checkpointing})
        return model

    def build_optimizer(self, model: nn.Module, **changes: Any) -> Any:
        """The method over a model, with some settings changed."""
        raise NotImplementedError

    def schedule_of(self, optimizer: Any) -> list[Any]:
        """The learning rate's schedule, where there is one."""
        return []

    def batch(self, update: int, micro: int, rank: int) -> Any:
        return batch_of(update, micro, rank)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(**batch).loss

    def result(self, run: Run) -> dict[str, Any]:
        """What this rank has at the end of a run; all plain tensors."""
        return {"norms": list(run.norms), "losses": list(run.losses), "updates": run.sliver.updates}

    def merged(self, run: Run) -> dict[str, torch.Tensor]:
        """The whole weights of the trained model, of which nothing trains any more; on rank 0 at least."""
        raise NotImplementedError

    def assert_equals_one_process(self, results: list[dict[str, Any]], layout: Layout) -> None:
        """Every rank of a run under a layout has what one process has that sees all ranks' rows."""
        raise NotImplementedError

    def assert_resumed(self, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
        """What was loaded stands where what was saved did."""
        raise NotImplementedError

    def assert_continued(self, results: list[dict[str, Any]], before: int) -> None:
        """These ranks have what one process has that saw so many ranks' rows before `cut`, and then those of these."""
        raise NotImplementedError

    def engine_config(self, stage: int) -> dict[str, Any]:
        """DeepSpeed's config."""
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip or 0.0,
            "steps_per_print": 10**9,
            **{torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": FP16}}.get(self.dtype, {}),
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": BUCKET,
                "stage3_prefetch_bucket_size": BUCKET,
                "stage3_param_persistence_threshold": 0,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            **self.engine,
        }


FP16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 1000, "hysteresis": 1}


def quiet() -> None:
    """DeepSpeed without its minute of compiling, and without its log."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)


@contextmanager
def accelerator_of(layout: Layout, case: Case) -> Iterator[Accelerator]:
    """An Accelerator of a layout; accelerate's shared state is forgotten before and after."""
    options: dict[str, Any] = {
        "gradient_accumulation_steps": case.accumulation,
        "mixed_precision": case.mixed_precision,
    }
    if layout in ("single", "ddp"):
        with one_device(**options) as accelerator:
            yield accelerator
    elif layout == "fsdp2":
        with on_fsdp2_ranks(
            plugin={
                "transformer_cls_names_to_wrap": case.blocks_of_fsdp2,
                "cpu_ram_efficient_loading": False,
                **case.plugin,
            },
            **options,
        ) as accelerator:
            yield accelerator
    else:
        quiet()
        with forgotten():
            accelerator = Accelerator(
                kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=case.engine_config(int(layout[-1]))),
                **options,
            )
            yield accelerator
            accelerator.free_memory()


class Run:
    """One rank of a run.

    Args:
        case: What to run.
        layout: Of ZeRO, where the case is of a bare engine.
        accelerator: Of the layout; None for a bare engine.
        rank: This rank.
        seed: Of the weights.
        changes: Settings that differ from the case's.
    """

    def __init__(
        self, case: Case, layout: Layout, accelerator: Any, rank: int, *, seed: int = 0, **changes: Any
    ) -> None:
        self.case, self.layout, self.accelerator, self.rank = case, layout, accelerator, rank
        self.plain: Any = self.build_model(seed)
        self.sliver = case.build_optimizer(self.plain, **changes)
        schedule = case.schedule_of(self.sliver)
        if case.bare:
            self.model, self.optimizer, _, self.schedule = st.initialize(
                model=self.plain,
                optimizer=self.sliver,
                lr_scheduler=(schedule or [None])[0],
                config=case.engine_config(int(layout[-1])),
            )
            assert self.optimizer is self.sliver
        else:
            self.model, self.optimizer, *schedules = st.prepare(accelerator, self.plain, self.sliver, *schedule)
            self.schedule = schedules[0] if schedules else None
        assert layout not in ZERO or self.model.zero_optimization_stage() == int(layout[-1])
        self.norms: list[float] = []
        """Of each update's gradient, before it is clipped."""
        self.losses: list[float] = []
        """Of each micro-batch."""
        self.on_micro: Callable[[], object] = lambda: None
        """Called between backward and step."""

    def build_model(self, seed: int) -> nn.Module:
        return self.case.build_model(seed)

    def train(self, first: int, last: int) -> Run:
        for update in range(first, last):
            for micro in range(self.case.accumulation):
                batch = self.case.batch(update, micro, self.rank)
                if self.case.bare:
                    self.backward(batch)
                    self.model.step()
                else:
                    with self.accelerator.accumulate(self.model):
                        self.backward(batch)
                        self._clip()
                        self.step()
            if self.case.bare:
                self.norms.append(float(self.model.get_global_grad_norm() or 0.0))
        return self

    def backward(self, batch: Any) -> None:
        loss = self.forward(batch)
        self.losses.append(loss.item())
        (self.model if self.case.bare else self.accelerator).backward(loss)
        self.on_micro()
        self._evaluate()

    def forward(self, batch: Any) -> torch.Tensor:
        device = self.model.device if self.case.bare else self.accelerator.device
        return self.case.loss(self.model, send_to_device(batch, device))

    def _evaluate(self) -> None:
        if self.case.evaluate:
            with torch.no_grad():
                self.forward(self.case.batch(0, 0, 9))

    def _clip(self) -> None:
        if self.case.max_norm is not None and self.accelerator.sync_gradients:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.max_norm)
            self.norms.append(float(getattr(norm, "full_tensor", lambda: norm)()))

    def step(self) -> None:
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        self._evaluate()


@contextmanager
def running(
    case: Case, layout: Layout, rank: int, *, kind: Callable[..., Run] = Run, seed: int = 0, **changes: Any
) -> Iterator[Any]:
    """A run of a kind that is prepared and, unless something fails, taken down; the other arguments are `Run`'s."""
    if case.bare:
        quiet()
        run = kind(case, layout, None, rank, seed=seed, **changes)
        yield run
        run.model.destroy()
    else:
        with accelerator_of(layout, case) as accelerator:
            run = kind(case, layout, accelerator, rank, seed=seed, **changes)
            yield run
            if layout in ZERO:
                run.model.destroy()
            elif isinstance(run.sliver, st.HiFT):
                run.sliver.detach()
            # Autograd holds these hooks, and they what they belong to: a model and its process groups, for good.
            for parameter in run.model.parameters():
                (parameter._post_accumulate_grad_hooks or {}).clear()


def save(run: Run, folder: Path) -> None:
    """Save a run as its users do."""
    if run.case.bare:
        run.model.save_checkpoint(str(folder))
    else:
        # The Trainer leaves out what is frozen of PEFT models; no one means what HiFT and SFT themselves have frozen.
        run.accelerator.save_state(str(folder), **{"exclude_frozen_parameters": True} if run.layout in ZERO else {})


def load(run: Run, folder: Path) -> None:
    """Load what `save` wrote."""
    if run.case.bare:
        assert run.model.load_checkpoint(str(folder))[0] is not None
    else:
        run.accelerator.load_state(str(folder))
        assert len(run.accelerator._optimizers) == 1


def refusal_of(case: Case, layout: Layout, rank: int, *, seed: int = 0) -> str:
    """What is raised where a case is prepared; nothing where it is accepted."""

    def prepare() -> None:
        with running(case, layout, rank, seed=seed):
            pass

    return message_of(prepare)


def message_of(call: Callable[[], object]) -> str:
    """What a call raises, with its class; nothing where it returns."""
    try:
        call()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
