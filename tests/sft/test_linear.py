"""The layer form against the optimizer form, and over 4-bit weights against the dequantised matrix; its gradients.

A little long: what a layer and the products in it have to fulfil is tested over the same few layers.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from slivertune import SFT
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.sft.linear import CHUNK_ROWS, chunk_edges, chunked_gradient, sampled_gradient
from slivertune.sft.packing import Positions
from tests.helpers.models import (
    assert_same_bits,
    assert_same_tree,
    bits,
    differing,
    tiny_llama,
    token_batches,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.tolerance import assert_step_close, assert_sums_close, sum_limit, unit_roundoff, with_exact
from tests.sft import runs
from tests.sft.runs import assert_keeps_state_dict, in_4_bits, sft_over

SELECTIONS = {"AG": ("accumulated_gradient", 1e-2), "MA": ("momentum", 3e-2)}


def make(model: nn.Module, selection: str, form: str, **options: Any) -> SFT:
    kind, lr = SELECTIONS[selection]
    return sft_over(
        model,
        selection=kind,
        form=form,
        lr=lr,
        weight_decay=0.5,
        **{"reselection_interval": 5, "estimation_steps": 3, **options},
    )


def made(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, SFT]:
    """A model, and SFT over it."""
    return model, make(model, *args, **options)


def train(model: nn.Module, optimizer: SFT, updates: int, *, micro: int = 2, autocast: bool = False) -> list[float]:
    losses = []
    batches = token_batches(5)
    for update in range(updates):
        for at in range(micro):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = model(**batches[(update * micro + at) % 5]).loss / micro
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return losses


class Wide(nn.Module):
    """Linear layers of more rows than one chunk of the gradient has, with a bias and without."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 2500)
        self.down = nn.Linear(2500, 12, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(inputs))).square().mean()


@rotated(selection=SELECTIONS, precision=["fp32", "fp32 with autocast", "bf16"], packed=[False, True])
def test_the_layer_form_equals_the_optimizer_form_to_the_bit(selection: str, precision: str, packed: bool) -> None:
    autocast = "autocast" in precision
    model = tiny_llama(torch.bfloat16 if precision == "bf16" else torch.float32)
    other, before = twin(model), weights(model)
    in_weights = make(model, selection, "optimizer", packed=packed)
    in_layers = make(other, selection, "layer", packed=packed)
    # Weights are reselected after updates 3 and 5.
    assert train(model, in_weights, 6, autocast=autocast) == train(other, in_layers, 6, autocast=autocast)
    assert_same_tree(in_weights.state_dict(), in_layers.state_dict())
    now = weights(other)
    assert differing({name: now[name] for name in before}, before) == [], "changed by the layer form"
    in_weights.detach()
    in_layers.detach()
    assert_same_bits(model, other)
    assert differing(weights(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_beyond_one_chunk_have_the_same_gradients(dtype: torch.dtype) -> None:
    start, inputs = Wide().to(dtype), torch.randn(15, 2, 3, 7, 12).to(dtype)

    def train(form: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        model, optimizer = made(twin(start), "AG", form, targets=[nn.Linear], density=0.02, reselection_interval=7)
        for parts in inputs:
            for part in parts:
                model(part).backward()
            optimizer.step()
        leaves = tree_flatten_with_path(optimizer.state_dict()["state"])[0]
        values = {keystr(path): leaf for path, leaf in leaves}
        tensors = {name: leaf for name, leaf in values.items() if isinstance(leaf, torch.Tensor)}
        floats = {name: leaf.clone() for name, leaf in tensors.items() if leaf.is_floating_point()}
        return {name: leaf for name, leaf in values.items() if name not in floats}, floats

    (others, expected), (_, exact) = with_exact(partial(train, "optimizer"))
    found_others, found = train("layer")
    assert_same_tree(found_others, others)
    # A product of some rows may sum in another order than that of all; one micro-batch more or less is half of them.
    for kind in ("delta", "exp_avg", "exp_avg_sq"):
        parts = (
            {name: value for name, value in each.items() if f"'{kind}'" in name} for each in (found, expected, exact)
        )
        assert_step_close(*parts, cap=1e-3 if dtype == torch.float32 else 2e-2, dtype=dtype)


def test_a_layer_that_is_applied_twice_gets_the_sum_of_both_gradients() -> None:
    model = nn.Linear(12, 12)
    other = twin(model)
    forms = [
        (model, make(model, "AG", "optimizer", targets=["weight"])),
        (other, make(other, "AG", "layer", targets=["weight"])),
    ]
    inputs = torch.randn(5, 12)

    def gradient(form: int) -> torch.Tensor:
        each, optimizer = forms[form]
        optimizer.zero_grad()
        each(torch.tanh(each(inputs))).square().sum().backward()
        return optimizer.param_groups[0]["params"][0].grad.clone()

    # One dense sum of two products against a sum of the two gathered ones.
    assert_step_close(gradient(1), *with_exact(lambda: gradient(0)), cap=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(reentrant: bool) -> None:
    model = tiny_llama()
    other = twin(model)
    enable_checkpointing(other, {"use_reentrant": reentrant})
    if reentrant:
        other.enable_input_require_grads()
    plain, checkpointed = make(model, "AG", "layer"), make(other, "AG", "layer")
    assert train(model, plain, 6) == train(other, checkpointed, 6)
    assert_same_tree(plain.state_dict(), checkpointed.state_dict())


def test_a_checkpoint_of_one_form_continues_in_the_other() -> None:
    model = tiny_llama(torch.bfloat16)
    other, third = twin(model), twin(model)
    first = make(model, "AG", "optimizer")
    train(model, first, 6)
    second = make(other, "AG", "layer")
    second.load_state_dict(first.state_dict())
    # Weights are reselected after updates 3, 5 and 10.
    assert train(model, first, 5) == train(other, second, 5)
    back = make(third, "AG", "optimizer")
    back.load_state_dict(second.state_dict())
    assert_same_tree(first.state_dict(), back.state_dict())


def test_detach_gives_the_layers_their_own_forward_and_bits_back() -> None:
    model = tiny_llama(torch.bfloat16)
    before, batch = weights(model), token_batches(1)[0]
    loss = model(**batch).loss.item()
    attributes = {path: sorted(vars(module)) for path, module in model.named_modules()}
    optimizer = make(model, "AG", "layer")
    train(model, optimizer, 5)
    assert model(**batch).loss.item() != loss
    optimizer.detach(merge=False)
    assert {path: sorted(vars(module)) for path, module in model.named_modules()} == attributes
    assert model(**batch).loss.item() == loss
    assert {name: value.requires_grad for name, value in model.named_parameters()} == dict.fromkeys(before, True)


def test_a_wrapper_that_came_later_survives_detach() -> None:
    model, optimizer = made(Wide(), "AG", "layer", targets=["up"])
    ours, calls = model.up.forward, []

    def wrapper(inputs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return ours(inputs)

    model.up.forward = wrapper
    expected = F.linear(inputs := torch.randn(2, 12), model.up.weight, model.up.bias)
    optimizer.detach(merge=False)
    assert torch.equal(model.up(inputs), expected) and calls


def test_an_error_inside_the_product_leaves_the_pretrained_bits() -> None:
    model, optimizer = made(Wide(), "AG", "layer", targets=["up"])
    before = weights(model)
    model(torch.randn(2, 12)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.up(torch.randn(2, 13))
    assert torch.equal(bits(model.up.weight), bits(before["up.weight"]))


def test_sampled_products_equal_chunked_ones_to_rounding() -> None:
    start = Wide()
    model, chunked = made(twin(start), "MA", "layer", targets=[nn.Linear], density=0.02)
    other, sampled = made(twin(start), "MA", "layer", targets=[nn.Linear], density=0.02, phi_gradient="sampled")
    inputs = torch.randn(9, 12)

    def gradients(model: nn.Module, optimizer: SFT) -> list[torch.Tensor]:
        optimizer.zero_grad()
        model(inputs).backward()
        found = [delta.grad.clone() for delta in optimizer.param_groups[0]["params"]]
        assert all(each.any() for each in found)
        return found

    assert_step_close(gradients(other, sampled), *with_exact(lambda: gradients(model, chunked)), cap=1e-4)


def quantised(dtype: torch.dtype = torch.bfloat16, *, bias: bool = True, double: bool = True) -> nn.Module:
    """Two 4-bit layers and a plain one."""
    model = nn.Sequential(
        bitsandbytes.nn.Linear4bit(
            64, 96, bias=bias, compute_dtype=dtype, quant_type="nf4", compress_statistics=double
        ),
        nn.Tanh(),
        bitsandbytes.nn.Linear4bit(96, 32, bias=False, compute_dtype=dtype, quant_type="nf4"),
        nn.Linear(32, 8, dtype=dtype),
    )
    return model.to("cpu").train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_over_4_bit_weights_output_and_input_gradient_are_those_of_the_dequantised_matrix(
    dtype: torch.dtype, bias: bool
) -> None:
    model = quantised(dtype, bias=bias)
    codes = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make(model, "AG", "auto", targets=["0", "2"])
    for _ in range(8):
        model(torch.randn(5, 64, dtype=dtype)).square().sum().backward()
        optimizer.step()
    delta = optimizer.deltas()["0.weight"]
    assert delta.shape == (96, 64) and delta.values.any()
    layer = model[0]
    matrix = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).clone()
    entries = matrix.view(-1)[delta.indices.long()]
    matrix.view(-1)[delta.indices.long()] = (entries.float() + delta.values).to(matrix.dtype)
    matrix = matrix.to(dtype)
    inputs, output_gradient = torch.randn(2, 5, 64, dtype=dtype), torch.randn(2, 5, 96, dtype=dtype)
    ours, theirs = inputs.clone().requires_grad_(True), inputs.clone().requires_grad_(True)
    output = layer(ours)
    expected = F.linear(theirs, matrix, None if layer.bias is None else layer.bias.to(dtype))
    output.backward(output_gradient)
    expected.backward(output_gradient)
    assert torch.equal(bits(output), bits(expected))
    assert torch.equal(bits(ours.grad), bits(theirs.grad))
    dense = (output_gradient.flatten(0, 1).t() @ inputs.flatten(0, 1)).flatten()[delta.indices.long()].float()
    assert torch.equal(optimizer.param_groups[0]["params"][0].grad, dense)
    assert_keeps_state_dict(model, codes)


def test_a_4_bit_layer_computes_in_its_own_dtype_and_answers_in_the_inputs() -> None:
    model, optimizer = made(quantised(torch.bfloat16, bias=False), "AG", "auto", targets=["0"])
    inputs = torch.randn(5, 64)
    layer = model[0]
    matrix = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).bfloat16()
    wanted = F.linear(inputs.bfloat16(), matrix).float()
    assert layer(inputs).dtype == torch.float32
    assert torch.equal(layer(inputs), wanted)
    optimizer.detach(merge=False)
    assert layer(inputs).dtype == torch.float32


@pytest.mark.parametrize("selection", SELECTIONS)
def test_4_bit_training_learns_and_resumes_to_the_bit(selection: str) -> None:
    torch.manual_seed(3)
    model = quantised()
    inputs, goal = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 8, dtype=torch.bfloat16)

    def loss_over(each: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda wanted: (each(inputs) - wanted).float().square().mean()

    optimizer = make(model, selection, "auto", targets=["0", "2", "3"], density=0.2)
    losses = runs.train(loss_over(model), optimizer, 19 * [goal])
    # The pair to load into: the same pretrained codes, and the plain layer as the checkpoint has it.
    torch.manual_seed(3)
    other, resumed = made(quantised(), selection, "auto", targets=["0", "2", "3"], density=0.2)
    resumed.load_state_dict(optimizer.state_dict())
    assert runs.train(loss_over(model), optimizer, 19 * [goal]) == runs.train(loss_over(other), resumed, 19 * [goal])
    assert_same_tree(optimizer.state_dict(), resumed.state_dict())
    assert runs.train(loss_over(model), optimizer, [goal])[0] < 0.8 * losses[0]


def test_a_quantised_llama_is_trained_in_its_layers_by_default() -> None:
    model = in_4_bits(tiny_llama(torch.bfloat16))
    codes = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make(model, "AG", "auto", packed=True)
    assert len(optimizer.deltas()) == 21
    losses = train(model, optimizer, 12)
    assert sum(losses[-10:]) < sum(losses[:10])
    assert_keeps_state_dict(model, codes)


@pytest.mark.parametrize("change", ["codes", "scales"])
def test_a_state_over_other_4_bit_weights_is_refused(change: str) -> None:
    model: Any = quantised()
    other = copy.deepcopy(model)
    optimizer, its_optimizer = (make(each, "AG", "auto", targets=["0"]) for each in (model, other))
    its_optimizer.load_state_dict(optimizer.state_dict())
    its_optimizer.detach(merge=False)
    if change == "codes":
        other[0].weight.data[0] ^= 1
    else:
        other[0].weight.quant_state.absmax[0] *= 2
    its_optimizer = make(other, "AG", "auto", targets=["0"])
    with pytest.raises(ValueError, match=r"state of 0\.weight belongs to other 4-bit weights than the model has"):
        its_optimizer.load_state_dict(optimizer.state_dict())


def test_merging_into_4_bit_is_refused() -> None:
    model, optimizer = made(quantised(), "AG", "auto", targets=["0"])
    with pytest.raises(ValueError, match=r"0\.weight is a 4-bit weight.*merge them into the 16-bit model"):
        optimizer.detach()
    optimizer.detach(merge=False)
    assert "forward" not in vars(model[0])


def test_the_optimizer_form_over_4_bit_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r'0\.weight is a 4-bit weight.*Use "auto" or "layer"'):
        make(quantised(), "AG", "optimizer", targets=["0"])


def test_codes_that_were_repacked_for_inference_are_refused() -> None:
    model, optimizer = made(quantised(), "AG", "auto", targets=["0"])
    model[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(RuntimeError, match=r"0\.weight was repacked"):
        model(torch.randn(2, 64, dtype=torch.bfloat16))
    optimizer.detach(merge=False)


@pytest.mark.parametrize(
    ("targets", "options", "text"),
    [
        (["embed_tokens"], {}, r"embed_tokens\.weight belongs to Embedding.*form=\"optimizer\""),
        (["q_proj"], {"phi_gradient": "sampled"}, r'phi_gradient="sampled" takes fp32 on a CPU'),
    ],
)
def test_what_the_layer_form_cannot_do_it_says(targets: list[str], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(tiny_llama(torch.bfloat16), "AG", "layer", targets=targets, **options)


def test_a_weight_of_two_layers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight belongs to several modules.*form=\"optimizer\""):
        make(model, "AG", "layer", targets=["0"])
    make(model, "AG", "optimizer", targets=["0"]).detach()


def test_torchs_encoder_evaluates_with_the_deltas() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    model, optimizer = made(nn.Sequential(layer), "AG", "layer", targets=["linear1", "linear2"])
    inputs = torch.randn(2, 5, 16)
    for weight in optimizer.param_groups[0]["params"]:
        weight.data.normal_()
    with torch.no_grad():
        expected, found = model.train()(inputs), model.eval()(inputs)
    assert_sums_close(found, expected, 100)


def test_a_backward_after_the_step_is_refused() -> None:
    model, optimizer = made(nn.Sequential(nn.Linear(8, 8)), "AG", "layer", targets=["0"])
    inputs = torch.randn(3, 8)
    model(inputs).square().sum().backward()
    loss = model(inputs).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"deltas of 0\.weight were updated between a forward and its backward"):
        loss.backward()


def case(rows: int, dtype: torch.dtype, density: float = 0.02) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output_gradient, inputs = torch.randn(24, rows).to(dtype), torch.randn(24, 50).to(dtype)
    count = max(1, int(density * rows * 50))
    return output_gradient, inputs, torch.randperm(rows * 50)[:count].sort().values.int()


def assert_products_close(
    found: torch.Tensor, output_gradient: torch.Tensor, inputs: torch.Tensor, indices: torch.Tensor | None = None
) -> None:
    """Entries of the dense gradient, whose kernel may sum fewer rows in another order and round once to their dtype."""
    exact = output_gradient.double().t() @ inputs.double()
    size = output_gradient.double().abs().t() @ inputs.double().abs()
    exact, size = (each.flatten() if indices is None else each.flatten()[indices.long()] for each in (exact, size))
    limit = sum_limit(len(inputs), torch.float32, size) + 2 * unit_roundoff(inputs.dtype) * exact.abs()
    assert found.shape == exact.shape and bool(((found.double() - exact).abs() <= limit).all())


def in_chunks(output_gradient: Any, inputs: Any, indices: torch.Tensor, on_chunk: Any = None) -> torch.Tensor:
    edges = chunk_edges(output_gradient.shape[1], inputs.shape[1])
    cuts = Positions(indices, edges[-1], packed=False).cuts(edges)
    return chunked_gradient(output_gradient, inputs, indices, cuts, on_chunk=on_chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 100, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS - 5])
def test_entries_are_those_of_the_dense_gradient(rows: int, dtype: torch.dtype) -> None:
    output_gradient, inputs, indices = case(rows, dtype)
    seen = []
    gradient = in_chunks(output_gradient, inputs, indices, lambda chunk, start: seen.append((start, chunk.clone())))
    assert gradient.dtype == torch.float32
    assert_products_close(gradient, output_gradient, inputs, indices)
    assert len(seen) == -(-rows // CHUNK_ROWS)
    assert all(chunk.numel() <= CHUNK_ROWS * 50 for _, chunk in seen)
    assert [start for start, _ in seen] == [0, *[start + chunk.numel() for start, chunk in seen][:-1]]
    whole = torch.cat([chunk for _, chunk in seen])
    assert_products_close(whole, output_gradient, inputs)
    assert torch.equal(gradient, whole[indices.long()].float())


def test_rows_without_an_active_weight_cost_nothing_wrong() -> None:
    output_gradient, inputs, _ = case(3 * CHUNK_ROWS, torch.float32)
    indices = torch.tensor([3, 2 * CHUNK_ROWS * 50 + 7], dtype=torch.int32)
    assert_products_close(in_chunks(output_gradient, inputs, indices), output_gradient, inputs, indices)


@pytest.mark.parametrize("rows", [1, 300])
def test_sampled_products_are_the_same_sums_in_another_order(rows: int) -> None:
    output_gradient, inputs, indices = case(rows, torch.float32)
    dense = (output_gradient.t() @ inputs).flatten()[indices.long()]
    sizes = (output_gradient.double().abs().t() @ inputs.double().abs()).flatten()[indices.long()]
    assert_sums_close(sampled_gradient(output_gradient, inputs, indices), dense, len(inputs), sizes)
