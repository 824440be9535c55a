"""`attach` under a stock Trainer on ZeRO-1, 2, 3 and FSDP2: two ranks against one process on the whole batch."""

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import slivertune
from slivertune import HiFTConfig, SFTConfig, TokenTune
from slivertune.tokentune import hook
from slivertune.training.ranks.processes import save_whole_model
from tests.helpers.models import tiny_llama
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import assert_step_close, distance, step_limit, with_exact
from tests.interop.test_trainer_ranks import BATCH, CAP, RANKS, UPDATES, StopAfter, collate, rows, steps_of

pytestmark = pytest.mark.slow

Weights = dict[str, torch.Tensor]
Steps = list[Weights]
"""After each update."""

ZERO = {"zero1": 1, "zero2": 2, "zero3": 3}
LAYOUTS = (*ZERO, "fsdp2")
SFT_LAYOUTS = ("zero2", "zero3", "fsdp2")
STOP = 7
HIFT = HiFTConfig()
# So dense that every weight is in the pool of candidates, as it is in one process.
SFT = SFTConfig(density=0.4, reselection_interval=6, estimation_steps=2)
TOKENS = TokenTune(ratio=0.5, pattern="random", always=(-1,))
"""The last token of each row has no target; selected in each, it leaves both ranks the same number of targets."""
TOKEN_LAYOUTS = ("zero2", "zero3", "fsdp2")
TAKEN_UP = {"zero2": "tokens", "zero3": "hift and tokens", "fsdp2": "tokens"}
"""The case that is also stopped and resumed, by layout."""
TOKEN_CASES: dict[str, tuple[Any, ...]] = {"tokens": (TOKENS,), "hift and tokens": (HIFT, TOKENS)}
OPTIONS: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "max_steps": UPDATES}


class Whole(TrainerCallback):
    """Remembers the whole weights after each update, gathered from the ranks."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append(whole_weights(kwargs["model"]))


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            value = parameter.detach()
            found[name] = getattr(value, "full_tensor", value.clone)().clone()
    return found


def layout_arguments(layout: str | None) -> dict[str, Any]:
    if layout not in ZERO:
        return {"use_cpu": True}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": ZERO[layout],
            "reduce_bucket_size": 20000,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    return {"deepspeed": config, "accelerator_config": {"use_configured_state": True}}


@contextmanager
def states(layout: str | None) -> Iterator[None]:
    """Accelerate's process-wide state, on CPUs; it would choose neither of these by itself."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if layout in ZERO:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    try:
        yield
    finally:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        AcceleratorState._reset_state(reset_partial_state=True)


def force_fsdp2(trainer: Trainer) -> None:
    """What a Trainer would be with GPUs and `fsdp_config={"version": 2, ...}`."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

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


def train(
    output: Path,
    batch: int,
    layout: str | None,
    *settings: Any,
    resume: Any = None,
    stop: int = 10**6,
    **options: Any,
) -> tuple[Trainer, list[dict[str, torch.Tensor]]]:
    """Train by what is attached, or as the Trainer does by itself."""
    watch, data = Whole(), rows(whole_labels=options.pop("whole_labels", False))
    arguments = {"save_strategy": "no", **OPTIONS, **options}
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=batch,
        train_sampling_strategy="sequential",
        # Where a gradient is next to nothing, Adam's first step turns its rounding into a whole step.
        adam_epsilon=1e-4,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
        **layout_arguments(layout),
        **arguments,
    )
    trainer = Trainer(
        model=tiny_llama(),
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:4],
        data_collator=collate,
        callbacks=[watch, StopAfter(stop)],
    )
    if layout == "fsdp2":
        force_fsdp2(trainer)
    optimizer = slivertune.attach(trainer, *settings).optimizer if settings else None
    trainer.train(resume_from_checkpoint=resume)
    if not isinstance(optimizer, slivertune.SFT):
        return trainer, watch.weights
    # Sharded weights stay as they were pretrained, so it is the deltas that tell.
    deltas = optimizer.deltas().items()
    found = {f"{name} at": each.indices for name, each in deltas} | {name: each.values for name, each in deltas}
    return trainer, [{name: value.clone() for name, value in found.items()}]


def on_a_rank(rank: int, world: int, folder: str, layouts: tuple[str, ...]) -> dict[str, Any]:
    if "DS_ACCELERATOR" in os.environ:
        import deepspeed

        # DeepSpeed would first compile its shared-memory collectives for a minute; gloo does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found: dict[str, Any] = {}
    for layout in layouts:
        output = Path(folder) / layout
        with states(layout):
            trainer, weights = train(output, BATCH, layout, HIFT, stop=STOP, save_strategy="steps", save_steps=STOP)
            found[layout] = {
                "world": trainer.args.world_size,
                "type": str(trainer.accelerator.distributed_type),
                "engine": type(trainer.model_wrapped).__name__,
                "stage": trainer.accelerator.state.deepspeed_plugin.zero_stage if layout in ZERO else None,
                "cut": weights,
                "logs": trainer.state.log_history[:-1],
            }
            trainer.accelerator.free_memory()
        with states(layout):
            trainer, weights = train(output, BATCH, layout, HIFT, resume=True)
            loss = trainer.evaluate()["eval_loss"]
            save_whole_model(trainer, output / "final")
            found[layout] |= {"again": weights, "loss": loss}
            trainer.accelerator.free_memory()
        with states(layout):
            found[layout]["whole"] = train(output / "whole", BATCH, layout, HIFT)[1]
        if layout in SFT_LAYOUTS:
            saving: dict[str, Any] = {"stop": STOP, "save_strategy": "steps", "save_steps": STOP}
            with states(layout):
                train(output / "sft", BATCH, layout, SFT, **saving)
            with states(layout):
                found[layout]["sft again"] = train(output / "sft", BATCH, layout, SFT, resume=True)[1]
            with states(layout):
                found[layout]["sft whole"] = train(output / "sft whole", BATCH, layout, SFT)[1]
        if layout in TOKEN_LAYOUTS:
            found[layout] |= {name: train_on_tokens(output / name, layout, name) for name in TOKEN_CASES}
    return found


def train_on_tokens(output: Path, layout: str, name: str) -> dict[str, Any]:
    """The weights after each update and the selection of every forward, and the weights of a run that stopped once."""
    seen: list[torch.Tensor] = []
    drawn = hook.draw_positions

    def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(drawn(*args, **kwargs))
        return seen[-1]

    settings = TOKEN_CASES[name]
    with mock.patch.object(hook, "draw_positions", draw), states(layout):
        trainer, weights = train(output / "whole", BATCH, layout, *settings, whole_labels=True)
    found = {"engine": type(trainer.model_wrapped).__name__, "weights": weights, "selections": seen}
    if TAKEN_UP[layout] != name:
        return found
    saving: dict[str, Any] = {"stop": STOP, "save_strategy": "steps", "save_steps": STOP}
    with states(layout):
        train(output / "cut", BATCH, layout, *settings, whole_labels=True, **saving)
    with states(layout):
        again = train(output / "cut", BATCH, layout, *settings, whole_labels=True, resume=True)[1]
    return {**found, "again": again}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    zero = run_ranks(on_a_rank, RANKS, str(folder), tuple(ZERO), env={"DS_ACCELERATOR": "cpu"}, timeout_s=420)
    fsdp2 = run_ranks(on_a_rank, RANKS, str(folder), ("fsdp2",), timeout_s=240)
    return [{**one, **other} for one, other in zip(zero, fsdp2, strict=True)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[tuple[Trainer, Steps], tuple[Trainer, Steps]]:
    """One process on the whole batch, and the same with exact sums."""
    with states(None):
        return with_exact(lambda: train(folder / "alone", RANKS * BATCH, None, HIFT))


# Sums over ranks, buckets and micro-batches are rounded in another order than sums over one batch.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_makes_the_updates_of_one_process(
    layout: str, ranks: list[dict[str, Any]], alone: tuple[tuple[Trainer, Steps], tuple[Trainer, Steps]]
) -> None:
    expected, exact = (steps_of(weights, trainer.state.log_history[:STOP]) for trainer, weights in alone)
    for rank in ranks:
        ours = rank[layout]
        assert ours["world"] == RANKS
        assert ours["engine"] == ("DeepSpeedEngine" if layout in ZERO else "FSDPLlamaForCausalLM")
        assert ours["stage"] == ZERO.get(layout)
        assert_step_close(steps_of(ours["whole"], ours["logs"]), expected, exact, cap=CAP)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumed_in_mid_cycle_goes_on_as_if_it_had_not_stopped(
    layout: str, ranks: list[dict[str, Any]], alone: tuple[tuple[Trainer, Steps], tuple[Trainer, Steps]]
) -> None:
    (_, expected), (_, exact) = alone
    for rank in ranks:
        ours = rank[layout]
        assert len(ours["cut"]) == STOP and len(ours["again"]) == UPDATES - STOP
        last = dict(zip(("again", "whole"), (ours["again"][-1], ours["whole"][-1]), strict=True))
        if layout == "zero3":
            assert distance(last["again"], last["whole"]) <= step_limit(expected[-1], exact[-1], CAP)
        else:
            assert [name for name, value in last["whole"].items() if not torch.equal(value, last["again"][name])] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_is_saved_as_a_plain_checkpoint(layout: str, ranks: list[dict[str, Any]], folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / layout / "final")
    saved = dict(model.named_parameters())
    for name, value in ranks[0][layout]["again"][-1].items():
        assert torch.equal(saved[name], value)
    assert ranks[0][layout]["loss"] == ranks[1][layout]["loss"]


def assert_near(found: Weights, expected: Weights, exact: Weights) -> None:
    """Positions exactly, weights and values but for the order of sums."""
    assert found.keys() == expected.keys()
    positions = {name: value for name, value in expected.items() if not value.is_floating_point()}
    assert [name for name, value in positions.items() if not torch.equal(found[name], value)] == []
    parts = ({name: each[name] for name in expected.keys() - positions.keys()} for each in (found, expected, exact))
    assert_step_close(*parts, cap=CAP)


@pytest.fixture(scope="module")
def sft_alone(folder: Path) -> tuple[Weights, Weights]:
    with states(None):
        return with_exact(lambda: train(folder / "sft alone", RANKS * BATCH, None, SFT)[1][-1])


@pytest.mark.parametrize("layout", SFT_LAYOUTS)
def test_sft_makes_the_updates_of_one_process_and_resumes(
    layout: str, ranks: list[dict[str, Any]], sft_alone: tuple[Weights, Weights]
) -> None:
    for rank in ranks:
        (whole,), (again,) = rank[layout]["sft whole"], rank[layout]["sft again"]
        assert_near(whole, *sft_alone)
        assert [name for name, value in whole.items() if not torch.equal(value, again[name])] == []


@pytest.fixture(scope="module")
def on_tokens(ranks: list[dict[str, Any]], folder: Path) -> Callable[[str, str], tuple[Steps, Steps]]:
    """One process that selects what the ranks of a layout selected in a case, and the same with exact sums."""

    def compute(layout: str, name: str) -> tuple[Steps, Steps]:
        drawn = zip(*(rank[layout][name]["selections"] for rank in ranks), strict=True)
        return of_selections(name, str([torch.cat(pair).tolist() for pair in drawn]))

    @functools.cache
    def of_selections(name: str, drawn: str) -> tuple[Steps, Steps]:
        def alone() -> Steps:
            left = json.loads(drawn)

            def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
                return torch.tensor(left.pop(0))

            with mock.patch.object(hook, "draw_positions", draw), states(None):
                found = train(folder / "tokens", RANKS * BATCH, None, *TOKEN_CASES[name], whole_labels=True)[1]
            assert not left
            return found

        return with_exact(alone)

    return compute


@pytest.fixture(scope="module")
def on_all_tokens(folder: Path) -> Callable[[str], Weights]:
    """The last weights of a case without its selection."""

    @functools.cache
    def compute(name: str) -> Weights:
        with states(None):
            return train(folder / "all", RANKS * BATCH, None, *TOKEN_CASES[name][:-1], whole_labels=True)[1][-1]

    return compute


@pytest.mark.parametrize("name", TOKEN_CASES)
@pytest.mark.parametrize("layout", TOKEN_LAYOUTS)
def test_ranks_that_select_tokens_make_the_updates_of_one_process_that_selects_the_same(
    layout: str,
    name: str,
    ranks: list[dict[str, Any]],
    on_tokens: Callable[[str, str], tuple[Steps, Steps]],
    on_all_tokens: Callable[[str], Weights],
) -> None:
    ours = [rank[layout][name] for rank in ranks]
    first, second = (each["selections"] for each in ours)
    assert len(first) == len(second) == UPDATES * OPTIONS["gradient_accumulation_steps"]
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    expected, exact = (steps_of(steps) for steps in on_tokens(layout, name))
    without = on_all_tokens(name)
    for each in ours:
        assert each["engine"] == ("DeepSpeedEngine" if layout in ZERO else "FSDPLlamaForCausalLM")
        assert_step_close(steps_of(each["weights"]), expected, exact, cap=CAP)
        difference = max(float((value - without[key]).abs().max()) for key, value in each["weights"][-1].items())
        assert difference > 1e-2, "the selection made no difference"
    last, other = (each["weights"][-1] for each in ours)
    assert [key for key, value in last.items() if not torch.equal(value, other[key])] == []


@pytest.mark.parametrize(("layout", "name"), TAKEN_UP.items())
def test_a_resumed_run_continues_the_draws(
    layout: str, name: str, ranks: list[dict[str, Any]], on_tokens: Callable[[str, str], tuple[Steps, Steps]]
) -> None:
    for rank in ranks:
        ours = rank[layout][name]
        assert len(ours["again"]) == UPDATES - STOP
        again, whole = ours["again"][-1], ours["weights"][-1]
        if layout == "zero3":
            expected, exact = on_tokens(layout, name)
            assert distance(again, whole) <= step_limit(expected[-1], exact[-1], CAP)
        else:
            assert [key for key, value in whole.items() if not torch.equal(value, again[key])] == []
