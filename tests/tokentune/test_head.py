from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    ASTForAudioClassification,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    VideoMAEForVideoClassification,
    ViTForImageClassification,
)

import slivertune as st
from slivertune.tokentune.head import find_head_kind
from tests.helpers.models import VOCAB, tiny_bert, tiny_llama
from tests.helpers.tolerance import assert_step_close, exact_sums
from tests.tokentune.families import Batch
from tests.tokentune.reference import selected


@pytest.fixture
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def batch() -> Batch:
    ids = torch.randint(1, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


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
        ("pooled", BertForNextSentencePrediction),
        ("pooled", ASTForAudioClassification),
        ("pooled", VideoMAEForVideoClassification),
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


def test_a_loss_function_that_shifts_the_labels_itself_is_refused(model: Any, batch: Batch) -> None:
    def shifting(logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def taking(logits: torch.Tensor, labels: torch.Tensor, shift_labels: Any = None, **kwargs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())

    model.loss_function = shifting
    with pytest.raises(ValueError, match=r"loss function .*shifting of LlamaForCausalLM has no parameter shift_labels"):
        st.TokenTune(ratio=0.3).attach(model)
    assert model.loss_function is shifting
    model.loss_function = taking
    with st.TokenTune(ratio=0.3, always=(0,)).attach(model) as handle:
        loss = model(**batch).loss
    own = tiny_llama().train()
    own.load_state_dict(model.state_dict())
    with handle.settings.attach(own):
        assert torch.equal(loss, own(**batch).loss)


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
