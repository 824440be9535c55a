"""Runs of a stock Trainer over fixed rows in their order, alone or on ranks of a layout, which tests compare."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback

import slivertune
from slivertune import HiFTConfig, SFTConfig
from slivertune.tokentune import hook
from tests.helpers.accelerator import forgotten
from tests.helpers.models import differing
from tests.helpers.tolerance import assert_step_close
from tests.training.test_callbacks import StopAfter, make_trainer

RANKS = 2
BATCH = 2
UPDATES = 12
"""Two rounds of five groups, and two more."""
STOP = 7
SAVING: dict[str, Any] = {"stop": STOP, "save_strategy": "steps", "save_steps": STOP}
"""Of a run that is cut after its first checkpoint."""
CAP = 1e-4
"""Of the largest weight, and of losses and norms: with a rate that is off by 1 % weights are 1e-2 apart."""
ZERO = {"zero1": 1, "zero2": 2, "zero3": 3}
HIFT = HiFTConfig.paper()
# So dense that every weight is in the pool of candidates, as it is in one process: of fewer each rank brings its own
# largest, among which one of the whole batch's may be missing.
SFT = SFTConfig(density=0.4, reselection_interval=6, estimation_steps=2)

Weights = dict[str, torch.Tensor]
Steps = list[Weights]
"""After each update."""


def rows(*, whole_labels: bool) -> list[dict[str, Any]]:
    """Fixed rows; each has another number of labels that count, unless the selection of tokens decides that."""
    ids = [[(7 * row + 3 * place) % 97 for place in range(8)] for row in range(96)]
    hidden = [0 if whole_labels else row % 5 for row in range(96)]
    return [
        {"input_ids": each, "labels": [-100] * count + each[count:]} for each, count in zip(ids, hidden, strict=True)
    ]


class Record(TrainerCallback):
    """Remembers the whole weights after each update, gathered from the ranks."""

    def __init__(self) -> None:
        self.weights: Steps = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        self.weights.append({name: whole(parameter) for name, parameter in model.named_parameters()})


def whole(parameter: Any) -> torch.Tensor:
    """A copy of a parameter's whole value, wherever its pieces are; every rank asks together."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return torch.clone(parameter.detach())
    value = parameter.detach()
    return torch.clone(getattr(value, "full_tensor", value.clone)())


def layout_arguments(layout: str | None) -> dict[str, Any]:
    if layout not in ZERO:
        return {}
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    stage = {
        "stage": ZERO[layout],
        "reduce_bucket_size": 20000,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    config = {**dict.fromkeys(auto, "auto"), "zero_optimization": stage}
    return {"deepspeed": config, "accelerator_config": {"use_configured_state": True}, "use_cpu": False}


@contextmanager
def states(layout: str | None) -> Iterator[None]:
    """Accelerate's process-wide state, on CPUs; it would choose neither of these by itself."""
    with forgotten():
        if layout in ZERO:
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
        try:
            yield
        finally:
            os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def force_fsdp2(trainer: Trainer) -> None:
    """What a Trainer would be with GPUs and `fsdp_config={"version": 2, ...}`."""
    state: Any = trainer.accelerator.state
    # Accelerate's own place for it too: other objects of its state take it from there.
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    trainer.is_fsdp_enabled = True


def run(
    output: Path,
    batch: int,
    settings: tuple[Any, ...],
    *,
    layout: str | None = None,
    resume: Any = None,
    stop: int = 10**6,
    whole_labels: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    **options: Any,
) -> tuple[Trainer, Steps, Any]:
    """Train by what is attached, or as the Trainer does by itself; the weights after each update, the attachment."""
    record, data = Record(), rows(whole_labels=whole_labels)
    # Where a gradient is next to nothing, Adam's first step turns its rounding into a whole step.
    arguments = {"max_steps": UPDATES, "adam_epsilon": 1e-4, **layout_arguments(layout), **options}
    trainer = make_trainer(
        output,
        record,
        StopAfter(stop),
        *callbacks,
        data=data,
        per_device_train_batch_size=batch,
        train_sampling_strategy="sequential",
        **arguments,
    )
    if layout == "fsdp2":
        force_fsdp2(trainer)
    attachment = slivertune.attach(trainer, *settings) if settings else None
    trainer.train(resume_from_checkpoint=resume)
    return trainer, record.weights, attachment


def train(output: Path, batch: int, layout: str | None, *settings: Any, **options: Any) -> tuple[Trainer, Steps]:
    """A run in which gradients are accumulated and clipped; of SFT its deltas and their places in the end."""
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, **options}
    trainer, weights, attachment = run(output, batch, settings, layout=layout, **options)
    if attachment is None or not isinstance(attachment.optimizer, slivertune.SFT):
        return trainer, weights
    # Sharded weights stay as they were pretrained, so it is the deltas that tell.
    return trainer, [deltas_of(attachment.optimizer)]


BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 4,
    # The loss falls, and greater counts as better, so the first evaluation is the best.
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
}
BEST_STEP = 4


class RecordDeltas(TrainerCallback):
    """Remembers SFT's deltas and their places when a checkpoint is saved."""

    def __init__(self) -> None:
        self.optimizer: Any = None
        self.saved: list[Weights] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(deltas_of(self.optimizer))


def deltas_of(optimizer: Any) -> Weights:
    """SFT's deltas and where they are, copied."""
    deltas = optimizer.deltas().items()
    return {f"{name} at": each.indices for name, each in deltas} | {name: each.values for name, each in deltas}


def train_to_the_best(output: Path, batch: int, layout: str | None, **options: Any) -> dict[str, Any]:
    """A run of SFT that ends with the model of its first checkpoint, and is evaluated again."""
    record = RecordDeltas()
    options = {"max_steps": UPDATES, **BEST, **layout_arguments(layout), **options}
    trainer = make_trainer(output, record, data=rows(whole_labels=False), per_device_train_batch_size=batch, **options)
    if layout == "fsdp2":
        force_fsdp2(trainer)
    record.optimizer = slivertune.attach(trainer, SFT).optimizer
    trainer.train()
    return {
        "saved": record.saved,
        "end": deltas_of(record.optimizer),
        "updates": record.optimizer.updates,
        "best": (Path(str(trainer.state.best_model_checkpoint)).name, trainer.state.best_metric),
        "loss": trainer.evaluate()["eval_loss"],
        "trainer": trainer,
    }


def assert_ended_with_the_best(found: dict[str, Any]) -> None:
    """It holds the deltas of the first checkpoint, to the bit, and computes with them."""
    assert len(found["saved"]) == UPDATES // BEST_STEP and differing(found["saved"][0], found["saved"][-1]) != []
    assert differing(found["end"], found["saved"][0]) == []
    assert found["best"] == (f"checkpoint-{BEST_STEP}", found["loss"])
    assert found["updates"] == BEST_STEP


@contextmanager
def as_in_training(attachment: Any) -> Iterator[Any]:
    """Inside, what was attached is on the model, as while `trainer.train()` runs. Gives the token selection."""
    attachment._begin()
    try:
        yield attachment.tokens
    finally:
        attachment._end()


@contextmanager
def recorded_draws() -> Iterator[list[torch.Tensor]]:
    """What is selected inside, one tensor a forward."""
    seen: list[torch.Tensor] = []
    drawn = hook.draw_positions

    def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(drawn(*args, **kwargs))
        return seen[-1]

    with mock.patch.object(hook, "draw_positions", draw):
        yield seen


def with_draws(positions: Sequence[torch.Tensor], compute: Callable[[], Any]) -> Any:
    """Compute with these selections in place of drawn ones, all of them."""
    with mock.patch.object(hook, "draw_positions", side_effect=positions) as draw:
        found = compute()
    assert draw.call_count == len(positions)
    return found


def steps_of(weights: Steps, logs: Sequence[dict[str, float]] = ()) -> Weights:
    """The weights after each update, and all losses and gradients' norms."""
    each = {f"{name}, update {step}": value for step, named in enumerate(weights) for name, value in named.items()}
    return each | {name: torch.tensor([log[name] for log in logs]) for name in ("loss", "grad_norm") if logs}


def counted(logs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each training log what is the same however the work is shared out."""
    assert all(log["tokens_per_second"] > 0 for log in logs)
    return [
        {name: log[name] for name in log if name.startswith(("hift/", "sft/")) or name == "learning_rate"}
        for log in logs
    ]


def assert_near(found: Weights, expected: Weights, exact: Weights) -> None:
    """Positions exactly, weights and values but for the order of sums."""
    assert found.keys() == expected.keys()
    positions = {name: value for name, value in expected.items() if not value.is_floating_point()}
    assert [name for name, value in positions.items() if not torch.equal(found[name], value)] == []
    parts = ({name: each[name] for name in expected.keys() - positions.keys()} for each in (found, expected, exact))
    assert_step_close(*parts, cap=CAP)
