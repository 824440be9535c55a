"""TokenTune where a Trainer makes the loss: TRL's SFTTrainer against the loss by hand, and what is refused."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

import slivertune
from slivertune import HiFTConfig, TokenTune
from slivertune.training.embedded.base_model import VOCABULARY_SIZE
from tests.helpers.models import tiny_bert, tiny_llama, weights
from tests.helpers.tolerance import assert_step_close, exact_sums, with_exact
from tests.interop.trainer_runs import as_in_training, recorded_draws
from tests.interop.trl_runs import (
    SFT_MODES,
    SFT_TAKES_TOKENS,
    mixture_trainer,
    preference_trainer,
    qlora_trainer,
    sft_trainer,
)
from tests.tokentune.families import FAMILIES
from tests.tokentune.reference import unselected_are_constants
from tests.training.test_callbacks import ROWS, collate, make_trainer

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # trl and peft ask others for what is deprecated

needs_fused_head = pytest.mark.skipif(not SFT_TAKES_TOKENS, reason="TokenTune goes with the SFTTrainer of trl 1.15")
LLAMA = FAMILIES["llama"]
TUNE = TokenTune(ratio=0.4, chunk_size=4, seed=5)
STEPS = 3
# Plain steps along the gradient: what an update changes is as far off as the gradient is, relative to its size.
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "max_steps": STEPS, "max_grad_norm": 0.0}
CAP = 1e-4
"""With another divisor, or one token more or less, updates are more than 1e-2 apart."""


class NaiveLoss:
    """The loss of the selected tokens by its definition, from the logits of a model that nothing is attached to.

    Args:
        trainer: Its `compute_loss` this is.
        draws: Selected positions of each forward.
    """

    def __init__(self, trainer: Any, draws: list[torch.Tensor]) -> None:
        self.draws: Iterator[torch.Tensor] = iter(draws)
        self.is_dft = trainer.args.loss_type == "dft"
        self.metrics: list[tuple[float, ...]] = []
        """Entropy and accuracy of each forward."""

    def __call__(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        loss, *metrics = selected_loss(model, inputs, next(self.draws), num_items_in_batch, is_dft=self.is_dft)
        self.metrics.append(tuple(map(float, metrics)))
        return loss


def selected_loss(
    model: nn.Module, inputs: Any, selection: torch.Tensor, num_items: Any, *, is_dft: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, entropy and accuracy of the selected tokens."""
    labels = inputs.pop("labels")
    with unselected_are_constants(model, LLAMA, selection):
        scores = model(**inputs, use_cache=False).logits.float().log_softmax(-1)
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    is_scored = targets != -100
    chosen = is_scored & torch.zeros_like(is_scored).scatter(1, selection, True)
    found = scores[chosen].gather(1, targets[chosen][:, None])[:, 0]
    entropy = -(scores[chosen].exp() * scores[chosen]).sum(-1).mean()
    accuracy = (scores[chosen].argmax(-1) == targets[chosen]).float().mean()
    total = -(found * found.exp().detach() if is_dft else found).sum()
    num_selected = int(chosen.sum())
    if num_items is None:
        return total / max(1, num_selected), entropy, accuracy
    return total / max(1.0, float(num_items) * num_selected / int(is_scored.sum())), entropy, accuracy


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "entropy" in log or "grad_norm" in log]


def updates_of(trainer: Any, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    after = weights(trainer.model)
    return {
        name: after[name].float() - value.float() for name, value in before.items() if after[name].is_floating_point()
    }


def assert_trains_as_by_hand(make: Callable[..., Any]) -> None:
    """A SFTTrainer with TokenTune makes the updates, and logs the figures, of one with the loss by hand."""
    trainer = make()
    before = weights(trainer.model)
    attachment = slivertune.attach(trainer, TUNE)
    with recorded_draws() as draws:
        trainer.train()
    assert len(draws) == STEPS * trainer.args.gradient_accumulation_steps

    def by_hand() -> tuple[Any, NaiveLoss]:
        # Its hooks are off when the backward begins, and would be missing where layers are computed again.
        reference = make(gradient_checkpointing=False, gradient_checkpointing_kwargs=None)
        reference.compute_loss = naive = NaiveLoss(reference, draws)
        reference.train()
        return reference, naive

    with exact_sums():
        exact, _ = by_hand()
    reference, naive = by_hand()
    expected = updates_of(reference, before)
    assert max(float(each.abs().max()) for each in expected.values()) > 1e-3
    assert_step_close(updates_of(trainer, before), expected, updates_of(exact, before), cap=CAP)
    found, steps = logs_of(trainer), trainer.args.gradient_accumulation_steps
    assert [log["loss"] for log in found] == pytest.approx([log["loss"] for log in logs_of(reference)], rel=1e-3)
    for number, metric in enumerate(("entropy", "mean_token_accuracy")):
        means = [
            sum(each[number] for each in naive.metrics[at : at + steps]) / steps for at in range(0, len(draws), steps)
        ]
        # As each forward's mean, of which the trainer logs the mean.
        assert [log[metric] for log in found] == pytest.approx(means, rel=1e-4), metric
    assert attachment.tokens is not None and attachment.tokens.num_draws == len(draws)


FAST = ("padding free", "lora")


@needs_fused_head
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode in FAST else pytest.mark.slow) for mode in SFT_MODES]
)
def test_sft_trainer_trains_on_the_selected_tokens_as_by_hand(mode: str, tmp_path: Path) -> None:
    # With probabilities near 1 / 258 as weights, DFT's gradients would vanish in the rounding of the weights.
    rate = {"learning_rate": 50.0} if mode == "dft" else {}
    assert_trains_as_by_hand(lambda **options: sft_trainer(tmp_path, mode, **{**SGD, **rate}, **options))


@needs_fused_head
@pytest.mark.slow
def test_qlora_under_sft_trainer_trains_on_the_selected_tokens_as_by_hand(tmp_path: Path) -> None:
    assert_trains_as_by_hand(lambda **options: qlora_trainer(tmp_path, **SGD, **options))


@needs_fused_head
@pytest.mark.slow
def test_a_mixture_of_experts_trains_without_its_routers_auxiliary_loss(tmp_path: Path) -> None:
    def make(**options: Any) -> Any:
        return mixture_trainer(tmp_path, **SGD, **options)

    with pytest.raises(ValueError, match=r"auxiliary loss of this SFTTrainer.*Set router_aux_loss_coef=0.0"):
        slivertune.attach(make(router_aux_loss_coef=0.1), TUNE)
    assert_trains_as_by_hand(lambda **options: make(router_aux_loss_coef=0.0, **options))


def test_reward_trainer_trains_on_the_selected_tokens_as_by_hand(tmp_path: Path) -> None:
    def make() -> Any:
        return preference_trainer("reward", tmp_path, **SGD)

    trainer = make()
    before = weights(trainer.model)
    slivertune.attach(trainer, TUNE)
    with recorded_draws() as draws:
        trainer.train()
    assert len(draws) == 2 * STEPS
    assert all(bool((each[:, 0] == 0).all()) for each in draws), "the first token is in every draw, as is the last"

    def by_hand() -> Any:
        reference, selections = make(), iter(draws)
        own = reference.compute_loss

        def compute_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
            with unselected_are_constants(model, LLAMA, next(selections)):
                return own(model, *args, **kwargs)

        reference.compute_loss = compute_loss
        reference.train()
        return reference

    expected, exact = with_exact(lambda: updates_of(by_hand(), before))
    assert_step_close(updates_of(trainer, before), expected, exact, cap=CAP)


# ---- one forward


def first_batch(trainer: Any) -> Any:
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


@needs_fused_head
def test_the_head_scores_the_selected_rows_alone(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path)
    seen: list[Any] = []
    trainer.model.register_forward_hook(lambda module, args, output: seen.append(output))
    trainer.model.train()
    with as_in_training(slivertune.attach(trainer, TUNE)) as handle:
        loss = trainer.compute_loss(trainer.model, first_batch(trainer))
    assert handle.last_selection is not None
    assert seen[0].log_probs.shape == seen[0].label_mask.shape == handle.last_selection.shape
    # Without a number of items it is the plain mean over the selected labels.
    assert torch.equal(loss, -seen[0].log_probs.sum() / seen[0].label_mask.sum())


@needs_fused_head
def test_a_draw_without_a_label_gives_a_loss_of_zero(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path)
    trainer.model.train()
    batch = first_batch(trainer)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with as_in_training(slivertune.attach(trainer, TUNE)):
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(40))
        loss.backward()
    assert loss.item() == 0.0
    assert all(bool((each.grad == 0).all()) for each in trainer.model.parameters() if each.grad is not None)


@needs_fused_head
def test_evaluation_is_that_of_the_trainer_alone(tmp_path: Path) -> None:
    alone, trainer = sft_trainer(tmp_path), sft_trainer(tmp_path)
    trainer.model.train()
    expected = alone.evaluate()
    with as_in_training(slivertune.attach(trainer, TUNE)):
        trainer.compute_loss(trainer.model, first_batch(trainer))  # its selection is not the evaluation's
        trainer._metrics["train"].clear()
        found = trainer.evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert found[name] == expected[name], name


@needs_fused_head
def test_the_trainer_has_its_own_loss_again_when_the_training_ends(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path, max_steps=2)
    attachment = slivertune.attach(trainer, HiFTConfig.paper(), TUNE)
    for _ in range(2):
        trainer.train()
        assert "compute_loss" not in vars(trainer)
    assert attachment.tokens is not None and attachment.tokens.num_draws == 8


@needs_fused_head
def test_another_trainer_of_a_hooked_model_does_not_divide_by_all_labels(tmp_path: Path) -> None:
    model = tiny_llama(vocab=VOCABULARY_SIZE)
    first, second = (sft_trainer(tmp_path / name, model=model, max_steps=1) for name in ("first", "second"))
    with (
        as_in_training(slivertune.attach(first, TUNE)),
        pytest.raises(ValueError, match="by a trainer of TRL that computes its loss from log-probabilities itself"),
    ):
        second.train()


@needs_fused_head
def test_a_compute_loss_of_the_instance_is_kept(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path)
    calls: list[Any] = []
    own = trainer.compute_loss
    trainer.compute_loss = mine = lambda *args, **kwargs: calls.append(None) or own(*args, **kwargs)
    trainer.model.train()
    with as_in_training(slivertune.attach(trainer, TUNE)):
        assert trainer.compute_loss is not mine
        trainer.compute_loss(trainer.model, first_batch(trainer))
    assert len(calls) == 1
    assert trainer.compute_loss is mine


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "does"),
    [
        ("dpo", "DPOTrainer, which compares the summed log-probabilities of whole completions"),
        ("grpo", "GRPOTrainer, which weighs every token of a completion"),
        pytest.param("kto", "KTOTrainer, which compares the summed", marks=pytest.mark.slow),
        pytest.param("rloo", "RLOOTrainer, which weighs every token", marks=pytest.mark.slow),
        pytest.param("orpo", "ORPOTrainer, which compares the summed", marks=pytest.mark.slow),
        pytest.param("cpo", "CPOTrainer, which compares the summed", marks=pytest.mark.slow),
    ],
)
def test_trainers_of_trl_whose_loss_needs_all_tokens_are_named(kind: str, does: str, tmp_path: Path) -> None:
    trainer = preference_trainer(kind, tmp_path)
    with pytest.raises(ValueError, match=f"does not go with TRL's {does}.*Train it with HiFT or SFT"):
        slivertune.attach(trainer, TUNE)
    assert "compute_loss" not in vars(trainer)


def test_the_sft_trainer_of_an_older_trl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("trl.trainer.utils.add_fused_lm_head", raising=False)
    trainer = sft_trainer(tmp_path)
    with pytest.raises(ValueError, match=r"the SFTTrainer of trl [0-9.]+, which .*\. Install trl 1\.15 or later"):
        slivertune.attach(trainer, TUNE)
    assert "compute_loss" not in vars(trainer)
    slivertune.attach(trainer, HiFTConfig.paper())


def test_a_trainer_of_trl_that_is_not_known_is_refused(tmp_path: Path) -> None:
    class Newest(Trainer):
        """As TRL may have one some day."""

    Newest.__module__ = "trl.trainer.newest_trainer"

    class Mine(Newest):
        """Of a project."""

    trainer = Mine(model=tiny_llama(), args=make_trainer(tmp_path).args, train_dataset=ROWS, data_collator=collate)
    with pytest.raises(ValueError, match="TRL's Newest, which makes its loss of the log-probabilities of all tokens"):
        slivertune.attach(trainer, TUNE)


class Decayed(trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """With a term of its own beside the loss, as a project may add one."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) + self.model.lm_head.weight.square().sum()


@needs_fused_head
def test_what_a_subclass_adds_to_the_loss_is_not_divided(tmp_path: Path) -> None:
    plain, decayed = sft_trainer(tmp_path), sft_trainer(tmp_path)
    decayed.__class__ = Decayed
    losses = []
    for each in (plain, decayed):
        slivertune.attach(each, TUNE)
        each.model.train()
        losses.append(each.compute_loss(each.model, first_batch(each), num_items_in_batch=torch.tensor(50)))
    assert torch.equal(losses[0] + plain.model.lm_head.weight.square().sum(), losses[1])


@needs_fused_head
def test_a_model_that_is_called_for_log_probabilities_without_the_trainer_is_refused(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path)
    trainer.model.train()
    batch = first_batch(trainer)
    with TUNE.attach(trainer.model):
        with pytest.raises(ValueError, match=r"fused_lm_head=True.*slivertune.attach\(trainer, TokenTune"):
            trainer.compute_loss(trainer.model, batch)
        with torch.no_grad():
            trainer.compute_loss(trainer.model, batch)


def test_label_smoothing_and_loss_functions_are_refused_where_tokens_are_scored(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs.logits.sum()

    for options, text in (
        (
            {"label_smoothing_factor": 0.1},
            "does not go with label_smoothing_factor=0.1 of this Trainer: the smoothed loss",
        ),
        ({"loss": loss}, "does not go with the compute_loss_func of this Trainer"),
    ):
        trainer = make_trainer(tmp_path, **options)
        with pytest.raises(ValueError, match=text):
            slivertune.attach(trainer, TUNE)
        trainer.train()
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1 of this SFTTrainer: the smoothed loss"):
        slivertune.attach(sft_trainer(tmp_path, label_smoothing_factor=0.1), TUNE)


def test_label_smoothing_of_a_classifier_is_taken(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "labels": number % 3} for number, row in enumerate(ROWS)]
    trainer = make_trainer(tmp_path, model=tiny_bert(), data=rows, label_smoothing_factor=0.1, max_steps=2)
    attachment = slivertune.attach(trainer, TUNE)
    trainer.train()
    assert attachment.tokens is not None and attachment.tokens.num_draws == 2


class Weighted(Trainer):
    """With a loss of its own over the logits of all tokens, as many projects have one."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model(**inputs).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def test_a_loss_of_the_trainers_own_over_all_logits_is_named(tmp_path: Path) -> None:
    args = make_trainer(tmp_path).args
    trainer = Weighted(model=tiny_llama(), args=args, train_dataset=ROWS, data_collator=collate)
    slivertune.attach(trainer, TUNE)
    with pytest.raises(ValueError, match=r"batch_size \(\d+\) to match target batch_size") as caught:
        trainer.train()
    (note,) = caught.value.__notes__
    assert re.match("Weighted.compute_loss computes a loss of its own.*Use the loss that the model returns", note)


def test_an_error_of_the_model_itself_stays_as_it_is(tmp_path: Path) -> None:
    rows = [{**row, "input_ids": [10**6] * 8} for row in ROWS]
    args = make_trainer(tmp_path).args
    trainer = Weighted(model=tiny_llama(), args=args, train_dataset=rows, data_collator=collate)
    slivertune.attach(trainer, TUNE)
    with pytest.raises(IndexError, match="index out of range") as caught:
        trainer.train()
    assert not hasattr(caught.value, "__notes__")
