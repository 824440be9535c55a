from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.modeling_outputs import ModelOutput

from slivertune.core.manifest import MANIFEST_NAME, find_damage
from slivertune.hift import HiFTConfig
from slivertune.interop import attach
from slivertune.sft import SFTConfig
from slivertune.training import callbacks
from slivertune.training.callbacks import CheckpointMarker, NonFiniteGuard
from slivertune.training.folders import checkpoint_folders, read_facts
from tests.helpers.models import assert_same_bits, tiny_llama
from tests.helpers.ranks import run_ranks
from tests.training.test_folders import make_checkpoint
from tests.training.tiny import quiet_arguments

ROWS = [{name: [(7 * row + 3 * i) % 97 for i in range(8)] for name in ("input_ids", "labels")} for row in range(16)]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def make_trainer(
    output: Path,
    *callbacks: TrainerCallback,
    model: nn.Module | None = None,
    data: list[dict[str, Any]] = ROWS,
    loss: Any = None,
    **options: Any,
) -> Trainer:
    defaults = {"max_steps": 6, "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2}
    arguments: dict[str, Any] = {**defaults, "per_device_train_batch_size": 2, **options}
    trainer = Trainer(
        model=model or tiny_llama(),
        args=quiet_arguments(output, **arguments),
        train_dataset=data,
        eval_dataset=data[:4],
        data_collator=collate,
        compute_loss_func=loss,
        callbacks=list(callbacks),
    )
    for each in callbacks:
        if isinstance(each, NonFiniteGuard):
            each.watch(trainer)
    return trainer


class StopAfter(TrainerCallback):
    """Ends a training after an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


class Watch(TrainerCallback):
    """Remembers the weights after each step."""

    def __init__(self) -> None:
        self.weights: list[list[torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append([parameter.detach().clone() for parameter in kwargs["model"].parameters()])

    def moved(self, step: int) -> bool:
        pairs = zip(self.weights[step - 2], self.weights[step - 1], strict=True)
        return not all(torch.equal(before, after) for before, after in pairs)


def poison(model: nn.Module, calls: set[int], *, what: str = "loss and gradient", value: float = float("nan")) -> None:
    """Break the loss, its gradient, or both, in the given training calls."""
    count = 0

    def after(module: nn.Module, inputs: Any, output: ModelOutput) -> ModelOutput:
        nonlocal count
        count += module.training
        if module.training and count in calls:
            if what == "gradient":
                output.loss.register_hook(lambda grad: grad * value)
            else:
                output["loss"] = output.loss + value if what == "loss" else output.loss * value
        return output

    model.register_forward_hook(after)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "hift"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_changes_nothing_and_is_said_once(
    method: str, gradient: bool, value: float, tmp_path: Path
) -> None:
    model, watch, said = tiny_llama(), Watch(), list[str]()
    poison(model, {3}, what="gradient" if gradient else "loss and gradient", value=value)
    guard = NonFiniteGuard(10, said.append)
    trainer = make_trainer(tmp_path, guard, watch, model=model)
    hift = attach(trainer, HiFTConfig.paper()).optimizer if method == "hift" else None
    trainer.train()
    assert [watch.moved(step) for step in (2, 3, 4)] == [True, False, True]
    assert all(tensor.isfinite().all() for tensor in watch.weights[-1])
    assert guard.num_skipped == len(said) == 1
    assert said[0].startswith(f"step 3: the {'gradient norm' if gradient else 'loss'} is ")
    if hift is not None:
        assert (hift.updates, hift.active_group) == (5, 0), "five groups had one turn each: it is the first one's again"


def test_a_broken_micro_batch_skips_the_whole_update(tmp_path: Path) -> None:
    model, watch, said = tiny_llama(), Watch(), list[str]()
    poison(model, {3})  # the first of the two of step 2
    guard = NonFiniteGuard(10, said.append)
    make_trainer(tmp_path, guard, watch, model=model, gradient_accumulation_steps=2, max_steps=3).train()
    assert (watch.moved(2), watch.moved(3), len(said)) == (False, True, 1)


def test_an_infinite_loss_with_finite_gradients_is_seen(tmp_path: Path) -> None:
    model, said = tiny_llama(), list[str]()
    poison(model, {1}, what="loss", value=float("inf"))
    make_trainer(tmp_path, NonFiniteGuard(10, said.append), model=model, max_steps=2).train()
    assert said == ["step 1: the loss is inf; this update is skipped (1 so far)"]


def test_the_loss_of_a_loss_function_is_seen(tmp_path: Path) -> None:
    said: list[str] = []

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs.logits.mean() + float("inf")

    trainer = make_trainer(tmp_path, NonFiniteGuard(10, said.append), loss=loss, max_steps=2)
    with pytest.raises(RuntimeError, match="none of the 2 updates since step 0 was applied, since their losses"):
        trainer.train()
    assert [line.split(";")[0] for line in said] == ["step 1: the loss is inf", "step 2: the loss is inf"]


@pytest.mark.parametrize("method", ["dense", "hift", "sft"])
def test_a_training_that_no_gradient_reached_is_an_error(method: str, tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return (outputs.logits.detach() + unused).mean()

    model, unused = tiny_llama(), torch.zeros(1, requires_grad=True)
    trainer = make_trainer(tmp_path, NonFiniteGuard(10, pytest.fail), model=model, loss=loss, max_steps=2)
    if method != "dense":
        attach(trainer, HiFTConfig.paper() if method == "hift" else SFTConfig(density=0.1))
    with pytest.raises(RuntimeError, match="none of the 2 updates since step 0 was applied, since no gradient reached"):
        trainer.train()


@pytest.mark.parametrize("method", ["dense", "hift", "sft"])
@pytest.mark.parametrize(
    ("options", "is_error"),
    [
        ({"max_steps": 1, "warmup_steps": 1}, True),
        ({"max_steps": 2, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1}, False),
        ({"max_steps": 1, "warmup_steps": 1, "learning_rate": 0.0}, False),
    ],
)
def test_a_training_whose_every_rate_was_0_is_an_error_unless_it_was_requested(
    options: dict[str, Any], is_error: bool, method: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, NonFiniteGuard(10, pytest.fail), model=tiny_llama(), **options)
    if method != "dense":
        attach(trainer, HiFTConfig.paper() if method == "hift" else SFTConfig(density=0.1))
    reason = "none of the 1 updates since step 0 was applied, since the learning rate was 0 in each.*--warmup_steps"
    with pytest.raises(RuntimeError, match=reason) if is_error else nullcontext():
        trainer.train()


def test_a_schedule_that_has_no_rate_before_its_first_step_has_not_the_rate_0(tmp_path: Path) -> None:
    """Some of DeepSpeed's have none."""
    model, arguments, state, control = nn.Linear(1, 1), quiet_arguments(tmp_path), TrainerState(), TrainerControl()
    schedule = Mock(get_last_lr=Mock(side_effect=AssertionError("need to call step() first")))
    guard = NonFiniteGuard(10, pytest.fail)
    guard.on_train_begin(arguments, state, control)
    guard.on_step_begin(arguments, state, control, lr_scheduler=schedule)
    model.weight.grad = torch.ones(1, 1)
    guard.on_pre_optimizer_step(arguments, state, control, model=model)
    guard.on_optimizer_step(arguments, state, control, optimizer=SimpleNamespace(step_was_skipped=False))
    state.global_step = 1
    guard.on_train_end(arguments, state, control)
    schedule.get_last_lr.assert_called_once()


OVERFLOWED = "since their gradients overflowed under fp16, whose loss scale falls for some updates"
UNREACHED = "since no gradient reached the trained weights"


@pytest.mark.parametrize(("fp16", "reason"), [(True, OVERFLOWED), (False, UNREACHED)])
@pytest.mark.parametrize("first_step", [0, 4])
def test_a_training_without_an_update_says_why_and_of_the_rest_of_one_it_is_no_error(
    first_step: int, fp16: bool, reason: str, tmp_path: Path
) -> None:
    # The Trainer takes fp16 on a GPU alone, whose scaler skips a step with an infinite gradient.
    said, model, state = list[str](), nn.Linear(1, 1), TrainerState(global_step=first_step)
    arguments, control, optimizer = quiet_arguments(tmp_path), TrainerControl(), SimpleNamespace(step_was_skipped=fp16)
    arguments.fp16, guard = fp16, NonFiniteGuard(10, said.append)
    guard.on_train_begin(arguments, state, control)
    for _ in range(3):
        model.weight.grad = torch.full((1, 1), float("inf")) if fp16 else None
        guard.on_pre_optimizer_step(arguments, state, control, model=model)
        guard.on_optimizer_step(arguments, state, control, optimizer=optimizer)
        state.global_step += 1
    message = f"none of the 3 updates since step {first_step} was applied, {reason}"
    with nullcontext() if first_step else pytest.raises(RuntimeError, match=rf"{message}\. The model is unchanged"):
        guard.on_train_end(arguments, state, control)
    assert said == [f"warning: {message}; the model is that of the checkpoint"] * bool(first_step)


def test_only_a_row_of_failures_stops_the_run(tmp_path: Path) -> None:
    model = tiny_llama()
    poison(model, {1, 2, 4, 5, 6})
    with pytest.raises(RuntimeError, match=r"3 updates in a row were not finite, the last at step 6.*--learning_rate"):
        make_trainer(tmp_path, NonFiniteGuard(3, lambda line: None), model=model, max_steps=9).train()


def test_a_finite_run_is_left_alone_and_nothing_hooked_on(tmp_path: Path) -> None:
    plain, guarded = tiny_llama(), tiny_llama()
    make_trainer(tmp_path, model=plain).train()
    make_trainer(tmp_path, NonFiniteGuard(1, lambda line: pytest.fail(line)), model=guarded).train()
    assert_same_bits(plain, guarded)
    assert not guarded._forward_hooks


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_made_in_the_backward_is_stopped_before_it(value: float, tmp_path: Path) -> None:
    model, watch = tiny_llama(), Watch()
    poison(model, {3}, value=value)
    guard = NonFiniteGuard(10, lambda line: pytest.fail(line), stops=True)
    trainer = make_trainer(tmp_path, guard, watch, model=model, max_grad_norm=0.0)
    attach(trainer, HiFTConfig.paper(gradients="stepped"))
    with pytest.raises(RuntimeError, match=rf"the loss is {value}, and --gradients stepped can't skip an update"):
        trainer.train()
    assert len(watch.weights) == 2
    assert all(torch.equal(a, b) for a, b in zip(watch.weights[-1], model.parameters(), strict=True))


def test_all_ranks_stop_before_a_backward_that_one_of_them_must_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "are_on_any_rank", lambda flags, device, doing: [True] * len(flags))
    model = tiny_llama()
    guard = NonFiniteGuard(10, lambda line: pytest.fail(line), stops=True)
    trainer = make_trainer(tmp_path, guard, model=model, max_grad_norm=0.0)
    attach(trainer, HiFTConfig.paper(gradients="stepped"))
    with pytest.raises(RuntimeError, match=r"the loss of another rank is not finite, .*can't skip an update"):
        trainer.train()
    assert_same_bits(model, tiny_llama())


def test_the_norm_of_gradients_that_were_stepped_in_the_backward_is_logged_as_any(tmp_path: Path) -> None:
    class Logs(TrainerCallback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.norms += [value for name, value in kwargs["logs"].items() if name == "grad_norm"]

    found = []
    for in_backward in (False, True):
        logs = Logs()
        guard = NonFiniteGuard(10, lambda line: pytest.fail(line), stops=in_backward)
        trainer = make_trainer(tmp_path, guard, logs, max_grad_norm=0.0)
        attach(trainer, HiFTConfig.paper(gradients="stepped" if in_backward else "device"))
        trainer.train()
        found.append(logs.norms)
    assert found[0] == found[1] and min(found[0]) > 0


class Look(TrainerCallback):
    """Notes which checkpoints are whole at each event of saving."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.before: list[list[str]] = []
        self.after: list[list[str]] = []

    def whole(self) -> list[str]:
        return [path.name for path in checkpoint_folders(self.output) if find_damage(path) is None]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before.append(self.whole())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after.append(self.whole())


def test_there_is_always_a_whole_checkpoint_once_there_was_one(tmp_path: Path) -> None:
    # Added before the marker, so that it looks when the Trainer has saved and the marker has not been written.
    look = Look(tmp_path)
    marker = CheckpointMarker({"method": "dense"}, save_total_limit=1)
    make_trainer(tmp_path, look, marker, max_steps=4, save_strategy="steps", save_steps=1).train()
    assert look.before == look.after == [[], ["checkpoint-1"], ["checkpoint-2"], ["checkpoint-3"]]
    assert look.whole() == ["checkpoint-4"]
    assert read_facts(tmp_path / "checkpoint-4") == {"method": "dense"}


def test_the_trainers_own_rotation_must_be_off(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="save_total_limit=1 deletes before a checkpoint is marked"):
        make_trainer(tmp_path, CheckpointMarker({}), save_total_limit=1).train()


def test_the_best_checkpoint_survives_the_limit(tmp_path: Path) -> None:
    steps = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "greater_is_better": True, "metric_for_best_model": "loss"}
    make_trainer(tmp_path, CheckpointMarker({}, save_total_limit=1), **steps, **best).train()
    # The loss falls, and greater counts as better, so the first is the best.
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint-1", "checkpoint-3"]


def test_a_damaged_checkpoint_that_will_be_written_over_loses_its_marker_first(tmp_path: Path) -> None:
    for step in (1, 9):
        (make_checkpoint(tmp_path, step) / "model.bin").write_bytes(b"short")
    whole = make_checkpoint(tmp_path, 5)
    make_trainer(tmp_path, CheckpointMarker({}), max_steps=1).train()
    assert not (tmp_path / "checkpoint-9" / MANIFEST_NAME).exists()
    assert (whole / MANIFEST_NAME).exists()


def on_a_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    model, watch, said = tiny_llama(), Watch(), list[str]()
    if rank == 1:
        poison(model, {3}, what="loss", value=float("inf"))
    trainer = make_trainer(Path(folder), NonFiniteGuard(10, said.append), watch, model=model)
    hift = attach(trainer, HiFTConfig.paper()).optimizer
    trainer.train()
    return {
        "said": said,
        "updates": hift.updates,
        "moved": [watch.moved(step) for step in range(2, 7)],
        "weights": watch.weights[-1],
    }


def test_all_ranks_skip_what_one_of_them_found(tmp_path: Path) -> None:
    first, second = run_ranks(on_a_rank, 2, str(tmp_path))
    assert first["said"] == [
        "step 3: a loss or gradient of another rank is not finite; this update is skipped (1 so far)"
    ]
    assert second["said"] == ["step 3: the loss is inf; this update is skipped (1 so far)"]
    for rank in (first, second):
        assert (rank["updates"], rank["moved"]) == (5, [True, False, True, True, True])
    assert all(torch.equal(one, other) for one, other in zip(first["weights"], second["weights"], strict=True))
