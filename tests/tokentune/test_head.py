from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    ViTForImageClassification,
)

import slivertune as st
from slivertune.tokentune.head import find_head_kind
from tests.helpers.models import VOCAB, tiny_bert, tiny_llama
from tests.helpers.tolerance import assert_step_close, assert_sums_close, exact_sums
from tests.tokentune.families import Batch
from tests.tokentune.reference import selected

TERMS = 20 + VOCAB + 64
"""Of a loss: a mean over rows of sums over the vocabulary, of products over the width."""


def make_batch(*lengths: int, total: int = 20) -> Batch:
    """Tokens whose labels are masked behind each row's length."""
    ids = torch.randint(1, VOCAB, (len(lengths), total), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.fixture
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def batch() -> Batch:
    return make_batch(20, 20)


def score_by_hand(model: Any, batch: Batch, selection: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The summed cross entropy of the selected positions, from the whole model's logits, and the labels it covers."""
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    chosen = torch.zeros(batch["labels"].shape, dtype=torch.bool).scatter(1, selection, True)[:, :-1]
    covered = chosen & (targets != -100)
    return losses[covered].sum(), int(covered.sum()), int((targets != -100).sum())


@pytest.mark.parametrize(
    ("kind", "model_class"),
    [
        ("causal", LlamaForCausalLM),
        ("causal", GPT2LMHeadModel),
        ("token", BertForMaskedLM),
        ("token", BertForTokenClassification),
        ("pooled", BertForSequenceClassification),
        ("pooled", LlamaForSequenceClassification),
        ("pooled", ViTForImageClassification),
        ("other", BertModel),
    ],
)
def test_the_class_name_tells_the_head(kind: str, model_class: type[nn.Module]) -> None:
    assert find_head_kind(model_class.__new__(model_class)) == kind


def test_a_class_derived_from_a_known_one_has_its_head() -> None:
    class Mine(LlamaForCausalLM):
        pass

    assert find_head_kind(Mine(tiny_llama().config)) == "causal"


def test_labels_by_token_for_an_unknown_head_are_refused(batch: Batch) -> None:
    model = BertForPreTraining(tiny_bert().config).train()
    with st.TokenTune(ratio=0.3).attach(model), pytest.raises(ValueError, match="does not know how this model scores"):
        model(**batch, next_sentence_label=torch.tensor([0, 1]))


def test_the_loss_is_the_mean_over_selected_positions_with_a_label(model: Any) -> None:
    batch = make_batch(20, 11, 6)
    for seed in range(5):
        with st.TokenTune(ratio=0.4, pattern="random", seed=seed).attach(model) as handle:
            loss = model(**batch).loss
        total, num_selected, _ = score_by_hand(model, batch, selected(handle))
        assert_sums_close(loss, total / num_selected, TERMS)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("num_items", [34, 100, 1])
def test_a_given_number_of_items_is_scaled_by_the_share_of_selected_labels(
    num_items: int, as_tensor: bool, model: Any
) -> None:
    batch = make_batch(20, 11, 6)
    with st.TokenTune(ratio=0.4, pattern="random").attach(model) as handle:
        loss = model(**batch, num_items_in_batch=torch.tensor(num_items) if as_tensor else num_items).loss
    total, num_selected, num_all = score_by_hand(model, batch, selected(handle))
    assert num_all == 34
    assert 0 < num_selected < num_all
    assert_sums_close(loss, total / max(1.0, num_items * num_selected / num_all), TERMS)


def test_scaled_losses_of_micro_batches_are_on_average_the_dense_loss(model: Any, batch: Batch) -> None:
    dense = model(**batch, num_items_in_batch=38).loss.item()
    losses = []
    for seed in range(100):
        with st.TokenTune(ratio=0.4, pattern="random", seed=seed).attach(model):
            losses.append(model(**batch, num_items_in_batch=38).loss.item())
    # The standard error of the mean is near 0.015.
    assert sum(losses) / len(losses) == pytest.approx(dense, abs=0.05)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 10}])
def test_no_selected_label_gives_a_loss_and_gradients_of_zero(
    options: dict[str, int], model: Any, batch: Batch
) -> None:
    batch["labels"][:] = -100
    batch["labels"][0, 5] = 3
    unlabelled = 0
    for seed in range(8):
        with st.TokenTune(ratio=0.1, pattern="random", seed=seed).attach(model) as handle:
            loss = model(**batch, **options).loss
            assert loss.isfinite()
            if 4 not in selected(handle)[0].tolist():
                unlabelled += 1
                model.zero_grad()
                loss.backward()
                assert loss.item() == 0.0
                assert all((each.grad == 0).all() for each in model.parameters() if each.grad is not None)
    assert unlabelled >= 4


def test_logits_are_those_of_the_selected_positions(model: Any, batch: Batch) -> None:
    with st.TokenTune(ratio=0.3).attach(model) as handle:
        logits = model(**batch).logits
        assert logits.shape == (2, 6, VOCAB)
        with torch.no_grad():
            full = model(**batch).logits
    assert full.shape == (2, 20, VOCAB)
    places = selected(handle)[:, :, None].expand(-1, -1, VOCAB)
    with exact_sums(), torch.no_grad():
        exact = model(**batch).logits.gather(1, places)
    assert_step_close(logits, full.gather(1, places), exact, cap=1e-4)  # of some rows, and of all


def test_shifted_labels_that_are_given_are_used(model: Any, batch: Batch) -> None:
    shifted = torch.roll(batch["labels"], -3, dims=1)
    with st.TokenTune(ratio=1.0).attach(model):
        loss = model(**batch, shift_labels=shifted).loss
    logits = model(input_ids=batch["input_ids"]).logits
    assert_sums_close(loss, F.cross_entropy(logits.flatten(0, 1), shifted.flatten()), TERMS)


def test_labels_by_position_in_the_call_are_found(model: Any, batch: Batch) -> None:
    with st.TokenTune(ratio=0.3).attach(model) as handle:
        named = model(**batch).loss
        handle.num_draws = 0
        # input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, labels
        by_position = model(batch["input_ids"], None, None, None, None, batch["labels"]).loss
    assert torch.equal(named, by_position)


def test_a_model_with_a_loss_of_its_own_is_refused(batch: Batch) -> None:
    class HomemadeForCausalLM(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            out = super().forward(input_ids=input_ids, **kwargs)
            out["loss"] = out.logits.sum()
            return out

    model = HomemadeForCausalLM(tiny_llama().config).train()
    expected = r"computes its loss without model.loss_function, so TokenTune.*\. Train it without TokenTune"
    with st.TokenTune(ratio=0.3).attach(model), pytest.raises(RuntimeError, match=expected):
        model(**batch)


def test_who_has_replaced_a_forward_that_scores_by_itself_is_named(model: Any, batch: Batch) -> None:
    own = model.forward

    def scored(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = own(input_ids=input_ids, **kwargs)
        out["loss"] = out.logits.sum()
        return out

    model.forward = MethodType(scored, model)
    expected = r"without model.loss_function \(in tests\.tokentune\.test_head\..*scored, which replaced its"
    with st.TokenTune(ratio=0.3).attach(model), pytest.raises(RuntimeError, match=expected):
        model(**batch)
