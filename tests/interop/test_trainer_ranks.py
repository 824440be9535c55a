"""`attach` on two ranks against one process with the whole batch, under DDP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import slivertune
from slivertune import HiFTConfig, SFTConfig, TokenTune
from slivertune.tokentune import hook
from tests.helpers.models import tiny_llama
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import assert_step_close, with_exact

RANKS = 2
BATCH = 2
UPDATES = 12
"""Two rounds of five groups, and two more."""
LENGTH = 8
CAP = 1e-4
"""Of the largest weight, and of losses and norms: with a rate that is off by 1 % weights are 1e-2 apart."""

CASES: dict[str, dict[str, Any]] = {
    "hift": {"settings": (HiFTConfig(),)},
    "hift in turns of two, accumulated, clipped": {
        "settings": (HiFTConfig(order="random", steps_per_group=2),),
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
        "max_steps": 20,
    },
    # So dense that every weight is in the pool of candidates: of fewer each rank brings its own largest, among which
    # one of the whole batch's may be missing.
    "sft": {"settings": (SFTConfig(density=0.4, reselection_interval=6, estimation_steps=2),)},
    "sft by momentum": {
        "settings": (SFTConfig(density=0.1, reselection_interval=4, selection="momentum"),),
        "learning_rate": 0.1,
    },
    # The last token of each row has no target; selected in each, it leaves both ranks the same number of targets, whose
    # means therefore average to the mean over the whole batch.
    "hift and tokens": {
        "settings": (HiFTConfig(), TokenTune(ratio=0.5, pattern="random", always=(-1,))),
        "whole_labels": True,
    },
    "tokens": {"settings": (TokenTune(ratio=0.5, pattern="random", always=(-1,)),), "whole_labels": True},
}
WITH_TOKENS = ("hift and tokens", "tokens")
WRAPPERS = {name: "DistributedDataParallel" if name == "tokens" else "LlamaForCausalLM" for name in CASES}
"""What is around the model: the stock Trainer's for all weights, and nothing for a sliver."""


def rows(*, whole_labels: bool) -> list[dict[str, Any]]:
    """Fixed rows; each has another number of labels that count, unless the selection of tokens decides that."""
    ids = [[(7 * row + 3 * place) % 97 for place in range(LENGTH)] for row in range(96)]
    hidden = [0 if whole_labels else row % 5 for row in range(96)]
    return [
        {"input_ids": each, "labels": [-100] * count + each[count:]} for each, count in zip(ids, hidden, strict=True)
    ]


def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}


class Record(TrainerCallback):
    """Remembers the weights after each update, and the selection of every forward."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        self.weights.append({name: value.detach().clone() for name, value in model.named_parameters()})


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            control.should_training_stop = True


def train(
    output: Path, batch: int, settings: tuple[Any, ...], *, resume: Any = None, stop: int = 10**6, **options: Any
) -> tuple[Trainer, Record, Any]:
    """A run on these rows in their order."""
    data = rows(whole_labels=options.pop("whole_labels", False))
    record = Record()
    arguments = {"max_steps": UPDATES, "learning_rate": 1e-2, "save_strategy": "no", **options}
    trainer = Trainer(
        model=tiny_llama(),
        args=TrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=batch,
            train_sampling_strategy="sequential",
            # Where a gradient is next to nothing, Adam's first step turns its rounding into a whole step.
            adam_epsilon=1e-4,
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
            dataloader_pin_memory=False,
            **arguments,
        ),
        train_dataset=data,
        data_collator=collate,
        callbacks=[record, StopAfter(stop)],
    )
    attachment = slivertune.attach(trainer, *settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, record, attachment


def on_a_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        seen: list[torch.Tensor] = []
        drawn = hook.draw_positions

        def draw(*args: Any, drawn: Any = drawn, seen: Any = seen, **kwargs: Any) -> torch.Tensor:
            seen.append(drawn(*args, **kwargs))
            return seen[-1]

        with mock.patch.object(hook, "draw_positions", draw):
            trainer, record, attachment = train(Path(folder) / name, BATCH, **case)
        found[name] = {
            "world": trainer.args.world_size,
            "layout": str(trainer.accelerator.distributed_type),
            "wrapper": type(trainer.model_wrapped).__name__,
            "weights": record.weights,
            "logs": trainer.state.log_history[:-1],
            "selections": seen,
            "deltas": {key: each.indices for key, each in attachment.optimizer.deltas().items()}
            if "sft" in name
            else {},
        }
        attachment.detach()
    found["resumed"] = {name: resumed(Path(folder) / f"resumed {name}", CASES[name]) for name in RESUMED}
    _, alone, attachment = train(Path(folder) / "alone", BATCH, resume=True, **CASES["hift"])
    attachment.detach()
    found["from one process"] = alone.weights
    return found


RESUMED = ("hift", "hift and tokens", "sft")
SAVING = {"save_strategy": "steps", "save_steps": 7}


def resumed(folder: Path, case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The last weights of a run that never stopped, and of one that was taken up after seven updates."""
    _, whole, attachment = train(folder / "whole", BATCH, **SAVING, **case)
    attachment.detach()
    train(folder / "cut", BATCH, stop=7, **SAVING, **case)[2].detach()
    _, again, attachment = train(folder / "cut", BATCH, resume=True, **case)
    attachment.detach()
    assert len(again.weights) == UPDATES - 7
    return whole.weights[-1], again.weights[-1]


def steps_of(weights: list[dict[str, torch.Tensor]], logs: Sequence[dict[str, float]] = ()) -> dict[str, torch.Tensor]:
    """The weights after each update, and all losses and gradients' norms."""
    each = {f"{name}, update {step}": value for step, named in enumerate(weights) for name, value in named.items()}
    return each | {name: torch.tensor([log[name] for log in logs]) for name in ("loss", "grad_norm") if logs}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    train(folder / "alone", RANKS * BATCH, stop=7, **SAVING, **CASES["hift"])
    return run_ranks(on_a_rank, RANKS, str(folder))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_updates_of_one_process_on_the_whole_batch(
    name: str, ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    case = CASES[name]
    replay = [torch.cat(pair) for pair in zip(*(rank[name]["selections"] for rank in ranks), strict=True)]

    def on_the_whole_batch() -> tuple[Trainer, Record, Any]:
        left = list(replay)

        def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
            return left.pop(0)

        with mock.patch.object(hook, "draw_positions", draw):
            made = train(tmp_path, RANKS * BATCH, **case)
        assert not left
        return made

    (trainer, record, attachment), (exact_trainer, exact_record, _) = with_exact(on_the_whole_batch)
    expected = steps_of(record.weights, trainer.state.log_history[:-1])
    exact = steps_of(exact_record.weights, exact_trainer.state.log_history[:-1])
    start = tiny_llama().state_dict()
    for rank in ranks:
        ours = rank[name]
        assert (ours["world"], ours["wrapper"]) == (RANKS, WRAPPERS[name])
        assert "MULTI_CPU" in ours["layout"]
        assert len(ours["weights"]) == len(record.weights) == case.get("max_steps", UPDATES)
        # Sums over the ranks are rounded in another order than sums over one batch.
        assert_step_close(steps_of(ours["weights"], ours["logs"]), expected, exact, cap=CAP)
    if "sft" not in name:
        moved = [key for key, value in record.weights[-1].items() if not torch.equal(value, start[key])]
        assert len(moved) == len(record.weights[-1]), "every layer had its turn"
    else:
        deltas = attachment.optimizer.deltas()
        assert all(
            torch.equal(rank[name]["deltas"][key], each.indices) for rank in ranks for key, each in deltas.items()
        )


@pytest.mark.parametrize("name", CASES)
def test_the_ranks_have_the_same_bits(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[name]["weights"][-1] for rank in ranks)
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_each_rank_selects_other_tokens(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[name]["selections"] for rank in ranks)
    assert len(first) == len(second) == UPDATES
    assert sum(not torch.equal(one, other) for one, other in zip(first, second, strict=True)) >= UPDATES - 2


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumed_in_mid_cycle_has_the_bits_of_one_that_never_stopped(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        whole, again = rank["resumed"][name]
        assert [key for key in whole if not torch.equal(whole[key], again[key])] == []


def test_two_ranks_continue_what_one_process_began_and_one_what_two_began(
    ranks: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    whole, exact = with_exact(lambda: train(tmp_path, RANKS * BATCH, **CASES["hift"])[1].weights[-1])
    _, alone, _ = train(folder / "resumed hift" / "cut", RANKS * BATCH, resume=True, **CASES["hift"])
    continued = [alone.weights, *(rank["from one process"] for rank in ranks)]
    for weights in continued:
        assert len(weights) == UPDATES - 7
        assert_step_close(weights[-1], whole, exact, cap=CAP)
