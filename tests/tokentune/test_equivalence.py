"""With all tokens selected TokenTune is the model itself; with some, it is the naive reference."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slivertune as st
from tests.helpers.pairwise import Row, assert_has_every_legal_pair, pairwise_rows, product_rows, row_params
from tests.tokentune.families import (
    ALL_MASKS,
    BATCH,
    CHECKPOINTING,
    FAMILIES,
    HIDDEN,
    VOCAB,
    Batch,
    Family,
    checkpointed,
    families,
    make_batch,
    make_model,
)
from tests.tokentune.reference import (
    assert_same,
    assert_same_bits,
    constants,
    dense_gradients,
    distance,
    model_gradients,
    reference_gradients,
    selected,
    take_gradients,
)

FACTORS: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "attention": ("sdpa", "eager"),
    "mask": ALL_MASKS,
    "selected": ("all", "some", "pads, too"),
    "checkpointing": tuple(CHECKPOINTING),
}


def is_legal(row: Row) -> bool:
    """Families have some of the attentions and masks alone, and without padding there is no pad to select."""
    family = FAMILIES.get(row.get("family", ""))
    masks = ALL_MASKS if family is None else family.masks
    if family is not None and row.get("attention", family.attentions[0]) not in family.attentions:
        return False
    if row.get("mask", masks[0]) not in masks:
        return False
    return row.get("selected") != "pads, too" or "padded" in row.get("mask", " ".join(masks))


ROWS = pairwise_rows(FACTORS, is_legal)
PRODUCT = product_rows({**FACTORS, "checkpointing": ("plain",)}, is_legal)


def rows_where_are_selected(*selected: str) -> Any:
    """The table's rows of these selections; the others that there are, without checkpointing, are slow."""
    rows = ([row for row in each if row["selected"] in selected] for each in (ROWS, PRODUCT))
    return pytest.mark.parametrize("row", row_params(*rows))


def test_the_rows_have_every_legal_pair_and_few_more() -> None:
    assert_has_every_legal_pair(ROWS, FACTORS, is_legal)
    # Families and masks alone have as many pairs.
    assert sum(len(family.masks) for family in FAMILIES.values()) <= len(ROWS) < len(PRODUCT) / 4


def of_row(row: Row) -> tuple[Family, Any, Batch]:
    """The family, its model and a batch."""
    family = FAMILIES[row["family"]]
    return family, make_model(family, row["attention"]), make_batch(family, row["mask"])


def every_position(family: Family) -> torch.Tensor:
    return torch.arange(family.length).expand(BATCH, -1)


def some_positions(family: Family, count: int = 5) -> torch.Tensor:
    """Others in each sequence; the first and the last are among them, which the pooled heads read."""
    generator = torch.Generator().manual_seed(3)
    inner = [torch.randperm(family.length - 2, generator=generator)[: count - 2] + 1 for _ in range(BATCH)]
    ends = torch.tensor([0, family.length - 1])
    return torch.stack([torch.cat([ends, each]) for each in inner]).sort(dim=1).values


# ---- the reference itself


@pytest.mark.slow
@pytest.mark.parametrize("row", row_params(row for row in PRODUCT if row["selected"] == "all"))
def test_the_reference_with_all_tokens_is_the_model_itself(row: Row) -> None:
    family, model, batch = of_row(row)
    expected = dense_gradients(model, batch)
    reference = reference_gradients(model, family, batch, every_position(family))
    assert_same(reference.loss, reference.gradients, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_every_cut_of_the_reference_takes_gradient_away(family: Family) -> None:
    model, batch, selection = make_model(family), make_batch(family), some_positions(family)
    loss, gradients, *_ = reference_gradients(model, family, batch, selection)
    for cut in family.cuts:
        less = dataclasses.replace(family, cuts=tuple(each for each in family.cuts if each is not cut))
        less_cut = reference_gradients(model, less, batch, selection)
        assert torch.equal(less_cut[0], loss)
        assert distance(less_cut[1], gradients) > 1e-3, f"{cut.module} carries no gradient of unselected tokens"


@pytest.mark.parametrize("family", families("llama", "gpt_neox", "falcon, grouped", "bloom", "gpt_oss", "bert, masked"))
def test_in_the_reference_embeddings_of_unselected_tokens_get_exactly_no_gradient(family: Family) -> None:
    # A head that is tied would add its own gradient to the embeddings; it is given weights of its own.
    # All are labelled, and the last token is left out: in a causal model nothing is scored on it.
    model, batch, selection = make_model(family), make_batch(family), some_positions(family)[:, :-1]
    batch["labels"] = batch["input_ids"]
    inputs: Any = model.get_input_embeddings()  # type: ignore[operator]
    outputs: Any = model.get_output_embeddings()  # type: ignore[operator]
    outputs.weight = nn.Parameter(outputs.weight.detach().clone())
    used = torch.zeros(VOCAB, dtype=torch.bool)
    used[batch["input_ids"].gather(1, selection)] = True
    gradients = reference_gradients(model, family, batch, selection).gradients
    of_embedding = next(gradients[name] for name, value in model.named_parameters() if value is inputs.weight)
    assert of_embedding is not None
    assert of_embedding[used].abs().amax(dim=1).min() > 0
    assert of_embedding[~used].abs().max() == 0


def test_the_reference_is_what_a_model_written_out_for_the_selected_rows_gives() -> None:
    """GPT-2 by hand: constants for all rows from a first pass, then the selected rows alone, in terms of them."""
    family = FAMILIES["gpt2"]
    model: Any = make_model(family)
    batch, selection = make_batch(family), some_positions(family)
    expected = reference_gradients(model, family, batch, selection)
    with torch.no_grad():
        constant = model(**batch, output_hidden_states=True).hidden_states
    rows = (torch.arange(BATCH)[:, None], selection)
    ids, labels = batch["input_ids"], batch["labels"]
    wte, wpe = model.transformer.wte.weight, model.transformer.wpe.weight
    hidden = wte[ids[rows]] + wpe[selection]
    for block, known in zip(model.transformer.h, constant, strict=False):
        hidden = gpt2_block_for_rows(block, hidden, known, rows)
    logits = F.layer_norm(hidden, (HIDDEN,), model.transformer.ln_f.weight, model.transformer.ln_f.bias) @ wte.T
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:][rows]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    assert_same(loss.detach(), take_gradients(model), expected)


def gpt2_block_for_rows(
    block: Any, hidden: torch.Tensor, known: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """One layer for selected rows, shape (batch, k, hidden), with all rows' values given as constants."""

    def linear(module: Any, given: torch.Tensor) -> torch.Tensor:
        return F.linear(given, module.weight.T, module.bias)

    def norm(module: Any, given: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(given, (HIDDEN,), module.weight, module.bias)

    def heads(given: torch.Tensor) -> torch.Tensor:
        return given.view(*given.shape[:2], 4, -1).transpose(1, 2)

    query, key, value = linear(block.attn.c_attn, norm(block.ln_1, hidden)).split(HIDDEN, dim=2)
    with torch.no_grad():
        _, all_keys, all_values = linear(block.attn.c_attn, norm(block.ln_1, known)).split(HIDDEN, dim=2)
    keys, values = all_keys.index_put(rows, key), all_values.index_put(rows, value)
    scores = heads(query) @ heads(keys).transpose(2, 3) / 8**0.5
    is_future = torch.arange(known.shape[1])[None, None, None] > rows[1][:, None, :, None]
    weights = scores.masked_fill(is_future, -torch.inf).softmax(dim=3)
    attended = (weights @ heads(values)).transpose(1, 2).flatten(2)
    hidden = hidden + linear(block.attn.c_proj, attended)
    inner: torch.Tensor = block.mlp.act(linear(block.mlp.c_fc, norm(block.ln_2, hidden)))
    return hidden + linear(block.mlp.c_proj, inner)


def test_the_reference_keeps_values_and_cuts_gradients() -> None:
    cut = FAMILIES["gpt2"].cuts[0]
    tensor = torch.randn(2, 4, 3 * HIDDEN, requires_grad=True)
    result = constants(tensor, torch.tensor([[1, 3], [0, 1]]), cut)
    assert torch.equal(result, tensor)
    (gradient,) = torch.autograd.grad(result.sum(), tensor)
    flows = torch.tensor([[False, True, False, True], [True, True, False, False]])
    assert torch.equal(gradient[..., :HIDDEN], torch.ones(2, 4, HIDDEN)), "queries are not cut"
    assert torch.equal(gradient[..., HIDDEN:], flows[..., None].expand(-1, -1, 2 * HIDDEN).float())


# ---- TokenTune


def hooked_gradients(model: nn.Module, batch: Batch, tune: st.TokenTune) -> tuple[Any, Any, torch.Tensor]:
    with tune.attach(model) as handle:
        return *model_gradients(model, batch), selected(handle)


@rows_where_are_selected("all")
def test_with_all_tokens_selected_loss_and_gradients_are_the_unhooked_models(row: Row) -> None:
    family, model, batch = of_row(row)
    expected = dense_gradients(copy.deepcopy(model), batch)
    checkpointed(model, CHECKPOINTING[row["checkpointing"]])
    loss, gradients, selection = hooked_gradients(model, batch, st.TokenTune(ratio=1.0))
    assert torch.equal(selection, every_position(family))
    assert_same(loss, gradients, expected)


@rows_where_are_selected("some", "pads, too")
def test_with_some_tokens_selected_loss_and_gradients_are_the_references(row: Row) -> None:
    family, model, batch = of_row(row)
    # Of 0.85 the shorter sequences have fewer tokens than are selected.
    ratio = 0.4 if row["selected"] == "some" else 0.85
    unhooked = copy.deepcopy(model)
    checkpointed(model, CHECKPOINTING[row["checkpointing"]])
    loss, gradients, selection = hooked_gradients(model, batch, st.TokenTune(ratio=ratio, pattern="random"))
    assert selection.dtype == torch.int64 and selection.shape == (BATCH, round(ratio * family.length))
    assert (selection.diff(dim=1) > 0).all()
    assert_same(loss, gradients, reference_gradients(unhooked, family, batch, selection))
    assert distance(gradients, model_gradients(unhooked, batch)[1]) > 1e-2, "the selection made no difference"


REMOVED = ("llama", "gemma3", "gpt2", "gpt_neox", "falcon, alibi", "bloom", "bert, masked", "mixtral", "gpt_oss", "vit")


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, id=name, marks=() if name in REMOVED else pytest.mark.slow) for name, each in FAMILIES.items()],
)
def test_after_remove_gradients_have_the_bits_of_before(family: Family) -> None:
    model, batch = make_model(family), make_batch(family)
    before = model_gradients(model, batch)
    hooked_gradients(model, batch, st.TokenTune(ratio=0.4))
    after = model_gradients(model, batch)
    assert torch.equal(before[0], after[0])
    assert_same_bits(after[1], before[1])
