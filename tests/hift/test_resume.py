"""Save, load into a new process's objects, continue: the same bits as a run that was never interrupted."""

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments

from slivertune import HiFT, HiFTConfig
from tests.helpers.accelerator import one_device
from tests.helpers.models import (
    Batch,
    assert_all_moved,
    assert_same_bits,
    assert_same_tree,
    differing,
    small_decoder,
    token_batches,
    trainable,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.ranks import quick
from tests.helpers.reference import decay_split, grouped_optimizer, train
from tests.hift.cases import BIG_VOCAB, OPTIMIZERS, hift_over, reloaded, warm_cosine


class Run:
    """A model, its HiFT and a schedule, which can be saved and made anew from what was saved."""

    def __init__(
        self, name: str, dtype: torch.dtype, total: int, *, weights_seed: int = 0, wrap: bool = False, **config: Any
    ):
        vocab = BIG_VOCAB if name == "AdamW8bit" else 97
        self.model = small_decoder(dtype, vocab=vocab, seed=weights_seed)
        self.batches: list[Batch] = token_batches(total, vocab=vocab)
        if wrap:
            base = grouped_optimizer(self.model, OPTIMIZERS[name][0], decay_split(self.model), lr=1e-2)
            self.hift = HiFT.wrap(base, self.model, config=HiFTConfig.paper(**config))
        else:
            self.hift = hift_over(self.model, name, **config)[1]
        self.scheduler = LambdaLR(self.hift, lambda step: warm_cosine(step, total))

    def train(self, start: int, steps: int) -> list[float]:
        return train(self.model, self.hift, self.batches, steps, start=start, scheduler=self.scheduler)

    def save(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.hift, "scheduler": self.scheduler}
        return reloaded({key: part.state_dict() for key, part in parts.items()})  # type: ignore[no-any-return]

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.hift.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])


def resume_at_every_step(
    name: str,
    dtype: torch.dtype,
    cycle: int,
    tmp_path: Path,
    *,
    wrap: bool = False,
    resumed: dict[str, Any] | None = None,
    at: Collection[int] | None = None,
    **config: Any,
) -> None:
    """Save in two cycles of updates; continue each from a model of other weights; compare losses and bits.

    What is continued is not saved again, so that this tells, too, that saving changes nothing.

    Args:
        name: An optimizer's.
        dtype: Of the weights.
        cycle: Updates of a cycle.
        tmp_path: Where state on disk lies.
        wrap: Whether a base optimizer with decay groups is wrapped.
        resumed: Settings of those that continue.
        at: After how many updates it is saved and continued; after each by default.
        **config: HiFT's fields.
    """

    def places(folder: str, chosen: dict[str, Any]) -> dict[str, Any]:
        return {**chosen, "state_dir": str(tmp_path / folder)} if chosen.get("state") == "disk" else chosen

    total = 2 * cycle + 2
    whole = Run(name, dtype, total, wrap=wrap, **places("whole", config))
    assert whole.hift.cycle_length == cycle
    before = weights(whole.model)
    chosen_updates = range(2 * cycle + 1) if at is None else at
    saves, losses = {}, []
    for done in range(total):
        if done in chosen_updates:
            saves[done] = whole.save()
        losses += whole.train(done, 1)
    assert_all_moved(whole.model, before)
    for done in chosen_updates:
        chosen = places(f"resumed{done}", {**config, **(resumed or {})})
        again = Run(name, dtype, total, weights_seed=9, wrap=wrap, **chosen)
        again.load(saves[done])
        assert again.hift.updates == done
        assert again.train(done, total - done) == losses[done:], f"resumed after {done} updates"
        assert_same_bits(again.model, whole.model)


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("every", ["few", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "dtype", "cycle", "config"),
    [
        ("AdamW", FP32, 5, {}),
        ("AdamW", BF16, 5, {"order": "random", "seed": 5}),
        ("AdamW", BF16, 9, {"layers_per_group": 2, "steps_per_group": 3, "order": "top2down"}),
        ("AdamW", BF16, 9, {"layers_per_group": 2, "steps_per_group": 3, "order": "random", "stream_bytes": 4096}),
        ("AdamW", BF16, 3, {"layers_per_group": 2, "master": "none"}),
        ("AdamW", BF16, 3, {"layers_per_group": 2, "state": "disk", "stream_bytes": 4096}),
        ("AdamW", BF16, 3, {"layers_per_group": 2, "state": "device"}),
        ("AdamW", BF16, 9, {"layers_per_group": 2, "steps_per_group": 3, "state": "discard"}),
        ("AdamW8bit", FP32, 3, {"layers_per_group": 2}),
        ("AdamW8bit", BF16, 3, {"layers_per_group": 2, "stream_bytes": 4096}),
        ("AdamW8bit", BF16, 3, {"layers_per_group": 2, "state": "disk"}),
        ("SGD", BF16, 3, {"layers_per_group": 2}),
        ("SGD momentum", FP32, 3, {"layers_per_group": 2}),
        ("Adagrad", BF16, 3, {"layers_per_group": 2}),
        ("RMSprop", BF16, 3, {"layers_per_group": 2}),
        ("torch Adafactor", BF16, 3, {"layers_per_group": 2}),
        ("transformers Adafactor with lr", BF16, 3, {"layers_per_group": 2}),
        ("own hyperparameter", BF16, 3, {"layers_per_group": 2}),
        ("AdamW", FP32, 1, {"layers_per_group": 5}),
        ("AdamW", BF16, 3, {"layers_per_group": 2, "wrap": True}),  # with decay groups
    ],
)
def test_a_run_resumed_at_any_step_has_the_same_bits(
    name: str, dtype: torch.dtype, cycle: int, config: dict[str, Any], every: str, tmp_path: Path
) -> None:
    at = None if every == "all" else [0, cycle + 1] if name == "AdamW8bit" else [cycle + 1]
    resume_at_every_step(name, dtype, cycle, tmp_path, at=at, **config)


OTHER_CHOICES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stream_bytes": 4096}, {"stream_bytes": 0}),
    ({"stream_bytes": 0}, {"stream_bytes": 20_000}),
    ({"state": "host"}, {"state": "disk"}),
    ({"state": "disk"}, {"state": "device", "stream_bytes": 4096}),
    ({"state": "device"}, {"state": "host"}),
]


@rotated(choices=OTHER_CHOICES, name=["AdamW", "AdamW8bit"])
def test_a_run_resumes_with_other_choices_of_memory(
    name: str, choices: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    saved, resumed = choices
    resume_at_every_step(name, BF16, 3, tmp_path, layers_per_group=2, at=[2, 4], resumed=resumed, **saved)


@pytest.mark.parametrize(("saved", "resumed"), [(0, 4096), (4096, 0), (4096, 20_000)])
def test_adapted_hyperparameters_resume_with_another_number_of_pieces(saved: int, resumed: int, tmp_path: Path) -> None:
    config = {"layers_per_group": 2, "elementwise": True, "stream_bytes": saved, "resumed": {"stream_bytes": resumed}}
    resume_at_every_step("own hyperparameter", BF16, 3, tmp_path, at=[2, 4], **config)


@rotated(
    config=[{}, {"state": "device"}, {"stream_bytes": 4096}],
    name=["AdamW8bit", "transformers Adafactor with lr", "AdamW"],
)
def test_loading_is_idempotent_and_saving_what_was_loaded_gives_it_back(name: str, config: dict[str, Any]) -> None:
    run = Run(name, BF16, 12, **config)
    run.train(0, 7)
    saved = run.save()
    first = copy.deepcopy(saved["optimizer"])
    again = Run(name, BF16, 12, weights_seed=9, **config)
    again.load(saved)
    again.load(saved)
    assert_same_tree(again.hift.state_dict(), first)
    again.hift.load_state_dict(again.hift.state_dict())
    assert_same_tree(again.hift.state_dict(), first)
    assert again.train(7, 5) == run.train(7, 5)
    assert_same_bits(again.model, run.model)


@rotated(config=[{}, {"state": "device"}], name=["AdamW", "SGD", "AdamW8bit"])
def test_loading_an_earlier_step_forgets_what_came_after_it(name: str, config: dict[str, Any]) -> None:
    run = Run(name, BF16, 12, **config)
    run.train(0, 2)
    saved = run.save()
    expected = run.train(2, 10)
    bits_then = weights(run.model)
    run.load(saved)
    assert run.hift.updates == 2
    assert run.train(2, 10) == expected
    assert differing(weights(run.model), bits_then) == []


@pytest.mark.parametrize("state", ["host", "device"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_run_with_parameters_that_never_have_a_gradient_resumes(dtype: torch.dtype, state: str) -> None:
    def steps(run: Run, start: int, count: int) -> None:
        for update in range(start, start + count):
            run.model(**run.batches[update]).loss.backward()
            for name, parameter in run.model.named_parameters():
                if "up_proj" in name:
                    parameter.grad = None
            run.hift.step()
            run.scheduler.step()

    run, again = (Run("AdamW", dtype, 12, layers_per_group=2, state=state, weights_seed=seed) for seed in (0, 9))
    steps(run, 0, 5)
    again.load(run.save())
    steps(run, 5, 7)
    steps(again, 5, 7)
    assert_same_bits(run.model, again.model)


def test_a_tensor_lr_resumes() -> None:
    def made(seed: int) -> tuple[torch.nn.Module, HiFT, LambdaLR]:
        model, hift = hift_over(small_decoder(seed=seed), torch.optim.AdamW, layers_per_group=2, lr=torch.tensor(1e-2))
        return model, hift, LambdaLR(hift, lambda step: warm_cosine(step, 9))

    batches = token_batches(9)
    model, hift, scheduler = made(0)
    train(model, hift, batches, 4, scheduler=scheduler)
    states = reloaded([part.state_dict() for part in (model, hift, scheduler)])
    train(model, hift, batches, 5, start=4, scheduler=scheduler)
    again = made(9)
    for part, saved in zip(again, states, strict=True):
        part.load_state_dict(saved)
    train(again[0], again[1], batches, 5, start=4, scheduler=again[2])
    assert_same_bits(again[0], model)


def test_what_a_resumed_run_saves_later_is_what_the_run_that_went_on_saves() -> None:
    run = Run("AdamW", torch.bfloat16, 30, stream_bytes=16_384)
    run.train(0, 7)
    again = Run("AdamW", torch.bfloat16, 30, weights_seed=3, stream_bytes=16_384)
    again.load(run.save())
    for each in (run, again):
        each.train(7, 16)
    assert_same_tree(again.hift.state_dict(), run.hift.state_dict())


@pytest.mark.parametrize("state", ["host", "device"])
def test_loading_does_not_keep_the_callers_tensors(state: str) -> None:
    run = Run("AdamW", BF16, 12, state=state)
    run.train(0, 7)
    loaded = run.save()["optimizer"]
    kept = copy.deepcopy(loaded)
    again = Run("AdamW", BF16, 12, state=state)
    again.train(0, 7)
    again.hift.load_state_dict(loaded)
    again.train(7, 5)
    assert_same_tree(loaded, kept)


def test_state_dict_is_by_parameter_name_and_holds_fp32_masters_of_visited_groups_alone() -> None:
    run = Run("AdamW", BF16, 12, layers_per_group=2)
    names = [name for name, _ in run.model.named_parameters()]
    empty = run.hift.state_dict()
    assert empty["state"] == {}
    assert sorted(name for group in empty["param_groups"] for name in group["params"]) == sorted(names)
    run.train(0, 2)
    state = run.hift.state_dict()["state"]
    visited = {name for group in run.hift.groups[:2] for name in group.parameter_names}
    assert set(state) == visited and visited < set(names)
    parameters = dict(run.model.named_parameters())
    for name, entry in state.items():
        assert "step" in entry
        for key in ("master", "exp_avg", "exp_avg_sq"):
            assert entry[key].dtype == FP32 and entry[key].shape == parameters[name].shape
        assert torch.equal(entry["master"].to(BF16), parameters[name])


def test_loading_restores_the_active_group_and_what_requires_a_gradient() -> None:
    run = Run("AdamW", FP32, 12, order="random", seed=3, steps_per_group=2)
    run.train(0, 5)
    again = Run("AdamW", FP32, 12, order="random", seed=3, steps_per_group=2)
    again.load(run.save())
    assert again.hift.active_group == run.hift.active_group
    assert trainable(again.model) == trainable(run.model)
    assert again.hift.held_lr == run.hift.held_lr


@pytest.mark.parametrize("done", quick(range(7), [2, 4]))
def test_accelerator_save_state_resumes_to_the_same_bits(tmp_path: Path, done: int) -> None:
    def prepared(seed: int) -> tuple[Run, Any, Any, Any]:
        run = Run("AdamW", BF16, 8, weights_seed=seed, layers_per_group=2, order="random")
        return run, *accelerator.prepare(run.model, run.hift, run.scheduler)

    def loop(run: Run, model: Any, optimizer: Any, scheduler: Any, start: int, steps: int) -> list[float]:
        losses = []
        for update in range(start, start + steps):
            loss = model(**run.batches[update]).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with one_device() as accelerator:
        first = prepared(0)
        loop(*first, 0, done)
        accelerator.save_state(str(tmp_path))
        expected = loop(*first, done, 8 - done)
        accelerator.free_memory()
        again = prepared(9)
        accelerator.load_state(str(tmp_path))
        assert loop(*again, done, 8 - done) == expected
    assert_same_bits(again[0].model, first[0].model)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_trainer_resumes_from_each_of_its_checkpoints_to_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    def trainer(seed: int, folder: str) -> tuple[Trainer, HiFT]:
        model, hift = hift_over(small_decoder(dtype, seed=seed), torch.optim.AdamW, layers_per_group=2, lr=1e-2)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder),
            max_steps=8,
            save_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        return Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(hift, None)), hift

    rows: Any = [{key: value[0] for key, value in batch.items()} for batch in token_batches(40, batch_size=1)]
    whole, hift = trainer(0, "whole")
    before = weights(whole.model)
    whole.train()
    assert hift.updates == 8
    assert_all_moved(whole.model, before)
    for done in range(1, 8):
        again, resumed = trainer(9, f"again{done}")
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{done}"))
        assert resumed.updates == 8
        assert_same_bits(again.model, whole.model)
