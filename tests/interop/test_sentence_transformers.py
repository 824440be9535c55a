"""The methods under sentence-transformers' trainers, against the same trainers with the method done by hand."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slivertune
from slivertune import SFT, HiFTConfig, SFTConfig, TokenTune
from slivertune.interop.loss_weights import LOSS_NAME, loss_weights, with_loss
from tests.helpers.models import differing
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.interop.by_hand import HandRotated
from tests.interop.sentence_runs import KINDS, sentence_trainer
from tests.interop.trainer_runs import as_in_training, recorded_draws
from tests.tokentune.families import FAMILIES
from tests.tokentune.reference import unselected_are_constants
from tests.training.test_callbacks import StopAfter

pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # it asks others for what is deprecated

BERT = replace(FAMILIES["bert, sequences"], layers="encoder.layer")
TUNE = TokenTune(ratio=0.4, chunk_size=2, seed=5)
SPARSE = SFTConfig(density=0.1, reselection_interval=4, estimation_steps=2)
WITH_CLASSIFIER = SFTConfig(
    density=0.1, reselection_interval=4, estimation_steps=2, targets=["query", "value", "classifier"]
)
CAP = 1e-4
"""With one token more or less, updates are more than 1e-2 apart."""


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy of the model's weights and the loss's own, by name."""
    named = {name: each for name, each in trainer.model.named_parameters() if "slivertune" not in name}
    return {name: each.detach().clone() for name, each in (named | loss_weights(trainer, trainer.model)).items()}


def kinds(*fast: str) -> Any:
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=[] if kind in fast else pytest.mark.slow) for kind in KINDS]
    )


@kinds("softmax")
def test_hift_equals_an_adamw_that_is_rotated_by_hand(kind: str, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_steps": 11}
    trainer, reference = (sentence_trainer(kind, tmp_path / name, **options) for name in ("hift", "reference"))
    before = trained(trainer)
    assert differing(before, trained(reference)) == []
    hift = slivertune.attach(trainer, HiFTConfig.paper()).optimizer
    groups = [group.parameter_names for group in hift.groups]
    stock = sentence_trainer(kind, tmp_path / "stock").create_optimizer()
    assert sum(map(len, groups)) == sum(len(group["params"]) for group in stock.param_groups)
    reference.optimizer = HandRotated(with_loss(reference, reference.model), groups)
    for each in (trainer, reference):
        each.train()
    assert hift.updates + sum(hift.skipped_turns.values()) == 11
    assert differing(trained(trainer), trained(reference)) == []
    still = before.keys() - differing(trained(trainer), before)
    # Sentences are means of tokens, which the pooler does not see.
    assert still == {name for name in before if "pooler" in name and kind != "cross encoder"}


@pytest.mark.parametrize(
    "kind", ["mnrl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cached mnrl", "cross encoder"))]
)
def test_sft_equals_a_trainer_that_was_given_the_optimizer(kind: str, tmp_path: Path) -> None:
    trainer, reference = (sentence_trainer(kind, tmp_path / name) for name in ("sft", "reference"))
    before = trained(trainer)
    slivertune.attach(trainer, SPARSE)
    reference.optimizer = SFT(reference.model, config=SPARSE, lr=1e-2, total_steps=7, eps=1e-8)
    for each in (trainer, reference):
        torch.manual_seed(0)
        each.train()
    assert differing(trained(trainer), trained(reference)) == []
    assert len(differing(trained(trainer), before)) == 18


@kinds("cross encoder")
def test_tokentune_trains_on_the_selected_tokens_as_by_hand(kind: str, tmp_path: Path) -> None:
    rate = 5.0 if kind == "cross encoder" else 0.5
    options = {"optim": "sgd", "learning_rate": rate, "max_steps": 3, "max_grad_norm": 0.0}

    def make() -> Any:
        return sentence_trainer(kind, tmp_path, **options)

    trainer = make()
    before = trained(trainer)
    attachment = slivertune.attach(trainer, TUNE)
    with recorded_draws() as draws:
        trainer.train()
    assert attachment.tokens is not None and attachment.tokens.num_draws == len(draws)
    assert len(draws) == 3 * {"cached mnrl": 4, "cross encoder": 1}.get(kind, 2)

    def by_hand() -> Any:
        reference, selections = make(), iter(draws)
        transformer = reference.model[0]
        own = transformer.forward

        def forward(features: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return own(features, **kwargs)
            with unselected_are_constants(transformer, BERT, next(selections)):
                return own(features, **kwargs)

        transformer.forward = forward
        reference.train()
        assert next(selections, None) is None
        return reference

    def updates(each: Any) -> dict[str, torch.Tensor]:
        after = trained(each)
        return {name: after[name] - value for name, value in before.items()}

    expected, exact = with_exact(lambda: updates(by_hand()))
    assert max(float(each.abs().max()) for each in expected.values()) > 1e-2
    assert_step_close(updates(trainer), expected, exact, cap=CAP)


RESUMED: dict[str, tuple[Any, ...]] = {
    "hift": (HiFTConfig.paper(),),
    "sft": (SPARSE,),
    "tokens": (TUNE,),
    "hift and tokens": (HiFTConfig.paper(), TUNE),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (kind, method)
        for kind in KINDS
        for method in RESUMED
        # Sentence-transformers keeps none of the loss's weights by itself.
        if kind not in ("softmax", "two losses") or method.startswith("hift")
    ],
)
def test_a_run_that_is_resumed_in_mid_cycle_has_the_bits_of_one_that_never_stopped(
    kind: str, method: str, tmp_path: Path
) -> None:
    assert_resumes(kind, RESUMED[method], tmp_path)


def assert_resumes(kind: str, settings: tuple[Any, ...], folder: Path) -> None:
    def run(name: str, stop: int, resume: bool = False) -> Any:
        trainer = sentence_trainer(kind, folder / name, max_steps=11, save_strategy="steps", save_steps=7)
        trainer.add_callback(StopAfter(stop))
        if resume:  # as another process might find them
            for each in loss_weights(trainer, trainer.model).values():
                nn.init.zeros_(each)
        slivertune.attach(trainer, *settings)
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer

    whole = run("whole", 11)
    cut = run("cut", 7)
    again = run("cut", 11, resume=True)
    assert again.state.global_step == 11
    assert differing(trained(again), trained(whole)) == []
    assert differing(trained(again), trained(cut)) != []
    has_weights = bool(loss_weights(whole, whole.model))
    assert (folder / "cut" / "checkpoint-7" / LOSS_NAME).exists() == has_weights


# ---- weights of the loss


def test_sft_refuses_a_classifier_that_it_would_not_train_and_trains_one_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(classifier.weight, classifier.bias\), and SFT trains only the linear"):
        slivertune.attach(sentence_trainer("softmax", tmp_path), SPARSE)
    trainer = sentence_trainer("softmax", tmp_path)
    before = trained(trainer)
    slivertune.attach(trainer, WITH_CLASSIFIER)
    trainer.train()
    moved = differing(trained(trainer), before)
    assert "classifier.weight" in moved and len(moved) == 1 + 3 * 2


@pytest.mark.slow
@pytest.mark.parametrize("targets", [WITH_CLASSIFIER.targets, ["classifier"]])
def test_sft_of_a_named_classifier_resumes(targets: list[str], tmp_path: Path) -> None:
    assert_resumes("softmax", (replace(WITH_CLASSIFIER, targets=targets),), tmp_path)


def test_a_checkpoint_without_the_losss_weights_is_not_resumed(tmp_path: Path) -> None:
    trainer = sentence_trainer("mnrl", tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    slivertune.attach(trainer, HiFTConfig.paper())
    trainer.train()
    other = sentence_trainer("softmax", tmp_path)
    slivertune.attach(other, HiFTConfig.paper())
    with pytest.raises(ValueError, match=r"slivertune_loss.safetensors has nothing, and the loss of this Sentence"):
        other.train(resume_from_checkpoint=True)


def test_weights_of_a_loss_are_refused_on_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = sentence_trainer("softmax", tmp_path)
    monkeypatch.setattr("slivertune.interop.loss_weights.layout_of", lambda accelerator: "ddp")
    with pytest.raises(ValueError, match=r"classifier.bias\), which are not in the model that ddp spreads.*one device"):
        slivertune.attach(trainer, HiFTConfig.paper())
    slivertune.attach(sentence_trainer("mnrl", tmp_path), HiFTConfig.paper())


# ---- TokenTune's hooks


def test_a_sentence_that_is_its_first_token_has_it_in_every_draw(tmp_path: Path) -> None:
    for pooling, is_always in (("cls", True), ("lasttoken", True), ("mean", False)):
        trainer = sentence_trainer("mnrl", tmp_path, pooling=pooling, max_steps=2)
        slivertune.attach(trainer, TUNE)
        with recorded_draws() as draws:
            trainer.train()
        assert all(bool((each[:, 0] == 0).all()) for each in draws) == is_always, pooling


def test_the_model_has_its_own_forward_again_and_a_copy_is_not_hooked(tmp_path: Path) -> None:
    trainer = sentence_trainer("mnrl", tmp_path)
    bert = trainer.model[0].model
    attachment = slivertune.attach(trainer, TUNE)
    trainer.model.train()

    def embed(model: Any) -> torch.Tensor:
        embedding: torch.Tensor = model(model.preprocess(["the cat sat on the mat"]))["sentence_embedding"]
        return embedding

    with as_in_training(attachment) as tokens:
        assert "forward" in vars(bert)
        copied = copy.deepcopy(trainer.model)
        embed(copied).sum().backward()
        assert tokens.num_draws == 0
        embed(trainer.model).sum().backward()
        assert tokens.num_draws == 1
    assert "forward" not in vars(bert)
    trainer.model.zero_grad()
    embed(trainer.model).sum().backward()
    theirs = dict(copied.named_parameters())
    assert all(
        each.grad is None or torch.equal(each.grad, theirs[name].grad)
        for name, each in trainer.model.named_parameters()
    )


def test_cached_gradients_are_refused_where_dropout_would_differ(tmp_path: Path) -> None:
    trainer = sentence_trainer("cached mnrl", tmp_path, dropout=0.1)
    slivertune.attach(trainer, TUNE)
    with pytest.raises(RuntimeError, match=r"gradient caching\), where dropout under TokenTune would drop"):
        trainer.train()
    trainer = sentence_trainer("mnrl", tmp_path, dropout=0.1, max_steps=2)
    slivertune.attach(trainer, TUNE)
    trainer.train()
