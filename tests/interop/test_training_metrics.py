"""What the Trainer's log holds beside the Trainer's own numbers, each counted again here."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback

import slivertune
from slivertune import HiFTConfig, SFTConfig, TokenTune
from slivertune.interop.training_metrics import metrics_of, plain_state_bytes
from tests.helpers.models import tiny_llama
from tests.helpers.ranks import quick
from tests.training.test_callbacks import ROWS, StopAfter, make_trainer

UPDATES = 12
RATE = 1e-2
GROUPS = ("model.embed_tokens", "model.layers.0.", "model.layers.1.", "model.layers.2.", "")
"""What the names of each group's parameters begin with, the first that fits: the last has what is left."""


def group_of(name: str) -> int:
    return next(index for index, start in enumerate(GROUPS) if name.startswith(start))


def scheduled(update: int) -> float:
    """The linear schedule's rate of an update, counted from 0."""
    return RATE * (UPDATES - update) / UPDATES


class Recorder(TrainerCallback):
    """Stands for a tracker that was there before anything was attached."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append({**kwargs["logs"], "step": state.global_step})


class GradientNorms(TrainerCallback):
    """Computes, before each update, the norm of a dense twin's gradient of the parameters whose turn it is."""

    def __init__(self, model: nn.Module, is_trained: Callable[[str, int], bool]) -> None:
        self.model = model
        self.is_trained = is_trained
        self.norms: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        twin = tiny_llama()
        twin.load_state_dict(self.model.state_dict())
        twin.train()
        rows = [ROWS[(2 * state.global_step + i) % len(ROWS)] for i in range(2)]
        twin(**{name: torch.tensor([row[name] for row in rows]) for name in rows[0]}).loss.backward()
        trained = [each for name, each in twin.named_parameters() if self.is_trained(name, state.global_step)]
        self.norms.append(float(nn.utils.clip_grad_norm_(trained, math.inf)))


def in_order(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    arguments = {"max_steps": UPDATES, "learning_rate": RATE, "train_sampling_strategy": "sequential", **options}
    return make_trainer(folder, *callbacks, **arguments)


def training_logs(trainer: Trainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def column(trainer: Trainer, name: str) -> list[Any]:
    return [entry[name] for entry in training_logs(trainer)]


# ---- HiFT


@pytest.mark.parametrize("steps_per_group", [1, 2])
def test_hift_logs_its_group_its_layers_and_the_rate_that_it_applied(steps_per_group: int, tmp_path: Path) -> None:
    model, recorder = tiny_llama(), Recorder()
    trainer = in_order(tmp_path, recorder, model=model)
    slivertune.attach(trainer, HiFTConfig.paper(order="top2down", steps_per_group=steps_per_group))
    trainer.train()
    cycle = len(GROUPS) * steps_per_group
    groups = [4 - step // steps_per_group % 5 for step in range(UPDATES)]
    assert column(trainer, "hift/group") == groups
    assert column(trainer, "hift/first_layer") == column(trainer, "hift/last_layer") == groups
    sizes = [sum(p.numel() for name, p in model.named_parameters() if group_of(name) == each) for each in range(5)]
    assert column(trainer, "hift/trained_parameters") == [sizes[group] for group in groups]
    assert column(trainer, "hift/updates") == list(range(1, UPDATES + 1))
    assert set(column(trainer, "hift/skipped_turns")) == {0}
    assert column(trainer, "learning_rate") == pytest.approx(
        [scheduled(step // cycle * cycle) for step in range(UPDATES)], rel=1e-12
    )
    assert column(trainer, "hift/scheduled_lr") == pytest.approx(
        [scheduled(step) for step in range(UPDATES)], rel=1e-12
    )
    # A callback that comes before ours sees what the history has.
    assert recorder.logs == trainer.state.log_history
    assert all(isinstance(value, int | float) for entry in recorder.logs for value in entry.values())


def test_several_layers_of_a_group_are_logged_as_a_range(tmp_path: Path) -> None:
    trainer = in_order(tmp_path, max_steps=4)
    slivertune.attach(trainer, HiFTConfig.paper(layers_per_group=2))
    trainer.train()
    layers = zip(column(trainer, "hift/first_layer"), column(trainer, "hift/last_layer"), strict=True)
    assert list(layers) == [(0, 1), (2, 3), (4, 4), (0, 1)]


@pytest.mark.parametrize(
    ("gradients", "max_grad_norm"),
    quick(
        [("device", 0.0), ("device", 0.05), ("host", 0.0), ("host", 0.05), ("stepped", 0.0)],
        [("device", 0.0), ("host", 0.05), ("stepped", 0.0)],
    ),
)
def test_the_norm_in_the_log_is_that_of_the_active_groups_dense_gradient(
    gradients: Any, max_grad_norm: float, tmp_path: Path
) -> None:
    model = tiny_llama()
    norms = GradientNorms(model, lambda name, step: group_of(name) == step % 5)
    trainer = in_order(tmp_path, norms, model=model, max_grad_norm=max_grad_norm)
    slivertune.attach(trainer, HiFTConfig.paper(gradients=gradients))
    trainer.train()
    # The same sums of squares, in another order where pieces of a gradient are measured each.
    assert column(trainer, "grad_norm") == pytest.approx(norms.norms, rel=1e-5)


@pytest.mark.filterwarnings("ignore:no (gradient|batch of a whole cycle) reached group")
def test_turns_that_no_gradient_reached_are_counted(tmp_path: Path) -> None:
    model = tiny_llama()
    # Nothing below the head has a gradient.
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(),))
    trainer = in_order(tmp_path, model=model)
    slivertune.attach(trainer, HiFTConfig.paper())
    trainer.train()
    skipped = list(itertools.accumulate(int(step % 5 != 4) for step in range(UPDATES)))
    assert column(trainer, "hift/skipped_turns") == skipped
    assert column(trainer, "hift/updates") == [step + 1 - count for step, count in enumerate(skipped)]


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_state_is_counted_where_it_lies(tier: Any, tmp_path: Path) -> None:
    folder = {"state_dir": str(tmp_path)} if tier == "disk" else {}

    def run(name: str) -> tuple[Trainer, nn.Module]:
        model = tiny_llama()
        trainer = in_order(tmp_path / name, model=model)
        slivertune.attach(trainer, HiFTConfig.paper(state=tier, **folder))
        trainer.train()
        return trainer, model

    earlier = run("earlier")  # a notebook's cell run twice: its state is alive, and is not the second run's
    trainer, model = run("run")
    assert earlier[0].optimizer.state_dict()["state"]
    sizes = [[p.numel() for name, p in model.named_parameters() if group_of(name) == each] for each in range(5)]
    for step, entry in enumerate(training_logs(trainer)):
        # All files are made before the first update.
        visited = [size for group in sizes[: None if tier == "disk" else step + 1] for size in group]
        # Adam's two moments; one count of steps a tensor; and off the device each tensor begins at a multiple.
        least, most = 8 * sum(visited), 8 * sum(visited) + (512 + 64 + 8) * len(visited)
        assert least <= entry[f"memory/state_{tier}_bytes"] <= most
        beside = dict.fromkeys({"device", "host", "disk"} - {tier}, 8 * len(visited))
        if tier == "disk":
            beside["host"] += 2 * max(8 * sum(size) + 584 * len(size) for size in sizes)
        assert all(entry[f"memory/state_{each}_bytes"] <= size for each, size in beside.items())


# ---- SFT, and none


def test_sft_logs_its_weights_its_reselections_and_its_state(tmp_path: Path) -> None:
    trainer = in_order(tmp_path)
    optimizer = slivertune.attach(trainer, SFTConfig(density=0.1, reselection_interval=4, estimation_steps=2)).optimizer
    trainer.train()
    assert column(trainer, "sft/updates") == list(range(1, UPDATES + 1))
    count = sum(len(delta.values) for delta in optimizer.deltas().values())
    assert set(column(trainer, "sft/trained_parameters")) == {count}
    # At 2, the end of the first estimation, and then at multiples of 4; two updates are estimated before each.
    assert column(trainer, "sft/reselections") == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert column(trainer, "sft/is_estimating") == [1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0]
    # Position 4, delta 4, pretrained value 4, moments 8, age 2.
    after = [entry["memory/state_device_bytes"] for entry in training_logs(trainer) if not entry["sft/is_estimating"]]
    assert set(after) == {22 * count}
    assert column(trainer, "learning_rate") == pytest.approx([scheduled(step) for step in range(UPDATES)], rel=1e-12)
    assert all("sft/scheduled_lr" not in entry for entry in training_logs(trainer))


def test_a_plain_optimizers_state_and_speed_are_logged_too(tmp_path: Path) -> None:
    trainer = in_order(tmp_path, optim="adamw_torch")
    assert metrics_of(trainer) is metrics_of(trainer)
    metrics_of(trainer).add(lambda: {"mine": 5})
    trainer.train()
    sizes = [p.numel() for p in trainer.model.parameters()]
    expected = sum(8 * size + 4 for size in sizes)
    assert set(column(trainer, "memory/state_device_bytes")) == {expected}
    assert set(column(trainer, "mine")) == {5}
    assert "mine" not in trainer.state.log_history[-1], "the summary of the run is the Trainer's alone"


def test_state_elsewhere_than_the_model_counts_as_host_memory() -> None:
    state = {"a": {"exp_avg": torch.zeros(3, device="meta"), "nested": [1], "step": torch.zeros(())}}
    assert plain_state_bytes(state, torch.device("meta")) == {"device": 12, "host": 4, "disk": 0}


# ---- speed


def test_tokens_a_second_are_those_of_the_updates_since_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An update begins and ends: it takes 1 second, then 2, 3, ...; between two of them lie 100.
    moments = itertools.accumulate(itertools.chain.from_iterable((100, update) for update in itertools.count(1)))
    monkeypatch.setattr("slivertune.interop.training_metrics.time.perf_counter", lambda: float(next(moments)))
    trainer = in_order(
        tmp_path,
        gradient_accumulation_steps=2,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=6,
    )
    slivertune.attach(trainer, TokenTune(ratio=0.5))
    trainer.train()
    tokens = 2 * 2 * 8  # two batches of two rows of eight
    assert column(trainer, "tokens_per_second") == [3 * tokens / (1 + 2 + 3), 3 * tokens / (4 + 5 + 6)]
    assert metrics_of(trainer).num_tokens == 6 * tokens
    assert (metrics_of(trainer).num_updates, metrics_of(trainer).seconds) == (6, 21)
    assert metrics_of(trainer).tokens_per_second == 6 * tokens / 21


# ---- trackers, and runs that go on


def test_tensorboards_files_have_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = in_order(tmp_path, TensorBoardCallback())
    slivertune.attach(trainer, HiFTConfig.paper())
    trainer.train()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    for name in training_logs(trainer)[0].keys() - {"step"}:
        written = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        # TensorBoard keeps fp32.
        logged = [entry for entry in trainer.state.log_history if name in entry]
        expected = [(entry["step"], pytest.approx(entry[name], rel=1e-6)) for entry in logged]
        assert written == expected, name


def test_a_resumed_run_logs_what_the_whole_run_does(tmp_path: Path) -> None:
    logs = {}
    for name, stop in (("whole", UPDATES), ("cut", 7)):
        trainer = in_order(tmp_path / name, StopAfter(stop), save_strategy="steps", save_steps=7)
        slivertune.attach(trainer, HiFTConfig.paper(steps_per_group=2))
        trainer.train()
        logs[name] = training_logs(trainer)
    trainer = in_order(tmp_path / "cut", save_strategy="no")
    slivertune.attach(trainer, HiFTConfig.paper(steps_per_group=2))
    trainer.train(resume_from_checkpoint=True)
    # Host memory that was filled at once has no gaps.
    others = {"tokens_per_second", "memory/state_host_bytes"}
    whole, resumed = (
        [{name: value for name, value in entry.items() if name not in others} for entry in each]
        for each in (logs["whole"], training_logs(trainer))
    )
    assert resumed == whole
