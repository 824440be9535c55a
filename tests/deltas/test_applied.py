"""Deltas on a model: the sums, their removal, names, and what is refused; many short tests of one function."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from slivertune.deltas import applied
from slivertune.deltas.applied import apply
from slivertune.deltas.delta import Overlap, SparseDelta, sum_deltas
from slivertune.deltas.delta_file import load, save_pretrained
from slivertune.deltas.names import NameIndex
from slivertune.deltas.sparse_file import DeltaFileError
from slivertune.sft import SFT, SFTConfig
from tests.deltas.files import (
    DOWN,
    QUERY,
    UP,
    Sharded,
    bits_of,
    damage,
    deltas_of,
    naive_sum,
    named,
    random_delta,
    same_bits,
    unchanged,
    write_deltas,
)
from tests.helpers.models import tiny_llama, token_batches
from tests.sft.runs import train

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_touched_weights_are_the_fp32_sums_rounded_once_and_come_back_to_the_bit(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_llama(dtype)
    model.get_parameter(UP).data.view(-1)[:500] = -0.0
    before, deltas = bits_of(model), deltas_of(model)
    expected = {
        name: naive_sum(weight, *[deltas[name]] if name in deltas else []).view(torch.uint8)
        for name, weight in named(model).items()
    }
    handle = apply(model, write_deltas(tmp_path / "deltas", model))
    assert same_bits(bits_of(model), expected)
    assert not same_bits(expected, before)
    for _ in range(2):
        handle.remove()
        assert same_bits(bits_of(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_what_training_saves_gives_the_trained_weights_on_a_fresh_base(
    dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    model = tiny_llama(dtype, tied=tied)
    config = SFTConfig(density=0.05, embeddings=True, reselection_interval=4, estimation_steps=2)
    optimizer = SFT(model, config=config, lr=1e-2, total_steps=7)
    train(model, optimizer, token_batches(7))
    save_pretrained(
        tmp_path / "deltas",
        optimizer.deltas(),
        config=asdict(config),
        base=named(model),
        base_values=optimizer.base_values(),
    )
    optimizer.detach()
    fresh = tiny_llama(dtype, tied=tied)
    before = bits_of(fresh)
    with unchanged(fresh), apply(fresh, tmp_path / "deltas"):
        assert same_bits(bits_of(fresh), bits_of(model))
        assert not same_bits(bits_of(fresh), before)


def test_a_delta_far_below_the_weights_spacing_is_not_rounded_before_the_sum() -> None:
    # 1 + 2^-8 + 2^-9 rounds to 1 + 2^-7 in bf16; either alone, or 2^-9 rounded on its own, would not get there.
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    halves = [
        {"weight": SparseDelta(torch.tensor([0], dtype=torch.int32), torch.tensor([value]), (1, 1))}
        for value in (2**-8, 2**-9)
    ]
    with apply(model, halves):
        assert model.weight.item() == 1 + 2**-7
    with apply(model, halves[0]):
        assert model.weight.item() == 1


def test_it_is_a_context_manager_that_lets_errors_through() -> None:
    model = tiny_llama()
    before = bits_of(model)

    with unchanged(model), pytest.raises(KeyError, match="mine"), apply(model, deltas_of(model)):  # noqa: PT012
        assert not same_bits(bits_of(model), before)
        raise KeyError("mine")


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_deltas_are_summed_and_their_overlap_reported(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_llama(dtype)
    folders = [write_deltas(tmp_path / str(seed), model, UP, DOWN, seed=seed) for seed in (0, 10)]
    third = deltas_of(model, UP, QUERY, seed=20)
    sources: list[dict[str, SparseDelta]] = [*(load(folder).deltas for folder in folders), third]
    expected = naive_sum(model.get_parameter(UP), *(source[UP] for source in sources))
    with unchanged(model), apply(model, [folders[0], load(folders[1]), third]) as handle:
        assert torch.equal(model.get_parameter(UP), expected)
        counts = {name: torch.zeros(model.get_parameter(name).numel(), dtype=torch.int) for name in (UP, DOWN, QUERY)}
        for source in sources:
            for name, delta in source.items():
                counts[name][delta.indices.long()] += 1
        assert handle.overlap_of == {
            name: Overlap(int((count > 0).sum()), int((count > 1).sum())) for name, count in counts.items()
        }
        shared, touched = (sum(int((count > least).sum()) for count in counts.values()) for least in (1, 0))
        assert shared > 0
        assert (handle.overlap.num_shared, handle.overlap.num_touched) == (shared, touched)
        assert handle.overlap.share == shared / touched
        assert handle.overlap_of[QUERY].share == 0


def test_deltas_of_one_tensor_must_have_one_shape() -> None:
    with pytest.raises(ValueError, match="deltas of one tensor must have one shape"):
        sum_deltas([random_delta((4, 4), 2, 0), random_delta((2, 8), 2, 0)])
    assert Overlap(0, 0).share == 0


def test_a_weight_that_is_not_contiguous_is_changed_at_its_logical_positions() -> None:
    model = nn.Linear(6, 4, bias=False)
    model.weight = nn.Parameter(torch.rand(6, 4).T)
    delta = random_delta((4, 6), 7, seed=3)
    expected = naive_sum(model.weight, delta)
    before = model.weight.detach().clone()
    with apply(model, {"weight": delta}):
        assert torch.equal(model.weight, expected) and not model.weight.is_contiguous()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_a_tied_weight_is_changed_once_under_either_name(name: str, tmp_path: Path) -> None:
    model = tiny_llama(tied=True)
    expected = naive_sum(named(model)[name], deltas_of(model, name)[name])
    with unchanged(model), apply(model, write_deltas(tmp_path / "deltas", model, name)) as handle:
        assert torch.equal(model.get_parameter(EMBEDDING), expected)
        assert model.get_parameter(HEAD) is model.get_parameter(EMBEDDING)
        assert handle.overlap == Overlap(40, 0)


def test_deltas_under_both_names_of_a_tied_weight_are_summed_or_refused() -> None:
    model = tiny_llama(tied=True)
    first, second = deltas_of(model, EMBEDDING, seed=1), deltas_of(model, HEAD, seed=2)
    expected = naive_sum(model.get_parameter(EMBEDDING), first[EMBEDDING], second[HEAD])
    with apply(model, [first, second]):
        assert torch.equal(model.get_parameter(EMBEDDING), expected)
    with pytest.raises(DeltaFileError, match=f"'{EMBEDDING}' and '{HEAD}' are one tensor in the model. Keep one"):
        apply(model, {**first, **second})


def test_deltas_of_a_tied_weight_are_refused_by_a_model_that_unties_it(tmp_path: Path) -> None:
    folder = write_deltas(tmp_path / "deltas", tiny_llama(tied=True), EMBEDDING)
    untied = tiny_llama()
    untied.get_parameter(EMBEDDING).data.copy_(tiny_llama(tied=True).get_parameter(EMBEDDING))
    with pytest.raises(DeltaFileError, match=r"were one tied tensor in training and are 2 in the model\. Tie them"):
        apply(untied, folder)


def test_tied_memory_is_one_weight_even_of_two_parameters() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 4, bias=False), "two": nn.Linear(4, 4, bias=False)})
    model["two"].weight.data = model["one"].weight.data
    delta = random_delta((4, 4), 3, seed=0)
    with pytest.raises(DeltaFileError, match="are one tensor in the model"):
        apply(model, {"one.weight": delta, "two.weight": delta})


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "compiled":
        for number, block in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
            model.model.layers[number] = torch.compile(block)  # type: ignore[union-attr, index, operator]
        return torch.compile(model)  # type: ignore[return-value]
    if kind == "data parallel":
        return nn.DataParallel(model)
    if kind == "peft":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(target_modules=["up_proj"]))  # type: ignore[arg-type]
    return model.model  # type: ignore[return-value]


# PEFT asks transformers' models under the older name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["compiled", "data parallel", "peft", "backbone"])
def test_names_are_found_behind_wrappers_and_prefixes(kind: str, tmp_path: Path) -> None:
    model = tiny_llama()
    folder = write_deltas(tmp_path / "deltas", model)
    weight = model.get_parameter(UP)
    expected = naive_sum(weight, deltas_of(model)[UP])
    with apply(wrapped(kind, model), folder):
        assert torch.equal(weight, expected)


def test_a_name_that_fits_several_tensors_or_none_is_not_guessed() -> None:
    index = NameIndex(["a.fc.weight", "b.fc.weight", "c.up.weight", "weight"])
    assert index.find("module.a.fc.weight") == "a.fc.weight"
    assert index.find("up.weight") == "c.up.weight"
    assert index.find("fc.weight") is None
    assert index.find("c.down.weight") is None
    assert index.find("weight") == "weight"
    wrapped_twice = NameIndex(["up.base_layer.weight", "up._orig_mod.weight"])
    assert wrapped_twice.find("up.weight") is None
    assert wrapped_twice.find("up._orig_mod.weight") == "up._orig_mod.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_base_is_refused_and_nothing_changed(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_deltas(tmp_path / "deltas", tiny_llama(dtype))
    model = tiny_llama(dtype)
    model.get_parameter(QUERY).data.view(torch.int16).view(-1)[-1] ^= 1
    with (
        unchanged(model),
        pytest.raises(DeltaFileError, match=rf"'{QUERY}' was trained on another base \(.*remove deltas applied"),
    ):
        apply(model, folder)
    # Its last entry is not among those that are touched.
    apply(model, folder, check_base=False).remove()
    with pytest.raises(
        DeltaFileError, match=r"was trained on a .* tensor, and this one is float16\. Load or save the base"
    ):
        apply(model.half(), folder, check_base=False)


def test_the_same_deltas_are_not_applied_twice(tmp_path: Path) -> None:
    model = tiny_llama()
    folder = write_deltas(tmp_path / "deltas", model)
    with apply(model, folder), pytest.raises(DeltaFileError, match="was trained on another base"):
        apply(model, folder)


def test_a_hostile_file_changes_nothing(tmp_path: Path) -> None:
    model = tiny_llama()
    good = write_deltas(tmp_path / "good", model)
    bad = damage(
        write_deltas(tmp_path / "bad", model), lambda tensors, _: tensors[f"{DOWN}.indices"].__setitem__(0, -5)
    )
    with unchanged(model), pytest.raises(DeltaFileError, match=r"indices\[0\]=-5"):
        apply(model, [good, bad])


def test_deltas_of_another_model_change_nothing() -> None:
    model = tiny_llama()
    good = deltas_of(model)
    for more, message in (
        ({"model.layers.9.mlp.up_proj.weight": good[UP]}, r"names no tensor of the model, or several\. Use the model"),
        ({"model.norm.weight": good[UP]}, r"has shape \(48, 32\), the model has \(32,\) there\. Use the base"),
    ):
        with unchanged(model), pytest.raises(DeltaFileError, match=message):
            apply(model, {**good, **more})


def test_a_file_names_its_base_model_when_a_tensor_is_not_found(tmp_path: Path) -> None:
    folder = write_deltas(tmp_path / "deltas", tiny_llama(), base_model_name="owner/base")
    with pytest.raises(DeltaFileError, match=r"Use the model that the deltas were trained on \(owner/base\)"):
        apply(nn.Linear(2, 2), folder)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("after_write", [False, True])
def test_application_is_all_or_nothing(
    error: BaseException, after_write: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(torch.bfloat16)
    calls = failing_write(monkeypatch, error, after_write=after_write)
    with unchanged(model), pytest.raises(type(error)):
        apply(model, deltas_of(model))
    assert len(calls) > 2


def failing_write(patch: pytest.MonkeyPatch, error: BaseException, *, after_write: bool) -> list[torch.Tensor]:
    """Let the second write of a weight fail; the weights that were written."""
    calls, write = [], applied.write_flat

    def fail(weight: torch.Tensor, *more: torch.Tensor) -> None:
        calls.append(weight)
        if len(calls) != 2 or after_write:
            write(weight, *more)
        if len(calls) == 2:
            raise error

    patch.setattr(applied, "write_flat", fail)
    return calls


def test_a_sum_beyond_the_dtype_is_refused_and_nothing_changed() -> None:
    model = tiny_llama(torch.float16)
    deltas = deltas_of(model)
    deltas[QUERY].values[3] = 70_000.0
    with (
        unchanged(model),
        pytest.raises(ValueError, match=rf"'{QUERY}': .* \+ 70000.0 is beyond the range of float16\. Use the base in"),
    ):
        apply(model, deltas)


def test_an_interrupted_removal_can_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(torch.bfloat16)
    before = bits_of(model)
    handle = apply(model, deltas_of(model))
    with monkeypatch.context() as patch:
        failing_write(patch, KeyboardInterrupt(), after_write=True)
        with pytest.raises(KeyboardInterrupt):
            handle.remove()
    assert not same_bits(bits_of(model), before)
    handle.remove()
    assert same_bits(bits_of(model), before)


def test_removal_is_refused_where_it_would_lose_later_changes() -> None:
    model = tiny_llama()
    before = bits_of(model)
    first = apply(model, deltas_of(model, seed=1))
    second = apply(model, deltas_of(model, seed=1))
    with pytest.raises(
        RuntimeError, match=f"'{UP}' has changed since deltas were applied.*remove the deltas that were applied later"
    ):
        first.remove()
    second.remove()
    first.remove()
    assert same_bits(bits_of(model), before)
    third = apply(model, deltas_of(model))
    assert next(model.bfloat16().parameters()).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"was torch.float32 when deltas were applied and is torch.bfloat16 now"):
        third.remove()


def test_training_on_applied_weights_bumps_their_version_and_keeps_the_parameters() -> None:
    model = tiny_llama()
    weight = model.get_parameter(UP)
    loss = (weight * weight).sum()
    with apply(model, deltas_of(model)), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert model.get_parameter(UP) is weight and weight.requires_grad and weight.is_leaf


def test_4_bit_weights_are_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.ModuleDict({"fc": bitsandbytes.nn.Linear4bit(64, 64, bias=False)})
    model["fc"].weight = bitsandbytes.nn.Params4bit(torch.rand(64, 64), requires_grad=False).to("cpu")
    assert model["fc"].weight.dtype == torch.uint8
    delta = random_delta((64, 64), 9, seed=0)
    save_pretrained(tmp_path / "deltas", {"fc.weight": delta}, config={}, base=named(model))
    text = r"the model holds uint8 there\. Quantised codes.*Load the model in 16 bits"
    for source in (tmp_path / "deltas", {"fc.weight": delta}):
        with unchanged(model), pytest.raises(DeltaFileError, match=text):
            apply(model, source)


def test_deltas_over_a_4_bit_base_go_on_plain_weights_on_request_alone(tmp_path: Path) -> None:
    delta = random_delta((64, 64), 9, seed=0)
    base = {"fc.weight": torch.zeros(2048, 1, dtype=torch.uint8)}
    save_pretrained(tmp_path / "deltas", {"fc.weight": delta}, config={}, base=base)
    model = nn.ModuleDict({"fc": nn.Linear(64, 64, bias=False)})
    with pytest.raises(DeltaFileError, match=r"was trained over uint8 codes.*set allow_quantized_base"):
        apply(model, tmp_path / "deltas")
    expected = naive_sum(model.get_parameter("fc.weight"), delta)
    with apply(model, tmp_path / "deltas", allow_quantized_base=True):
        assert torch.equal(model.get_parameter("fc.weight"), expected)


def test_a_sharded_weight_is_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Sharded))
    with pytest.raises(ValueError, match=re.escape("'weight' is sharded. Apply deltas before the model is sharded")):
        apply(model, {"weight": random_delta((2, 2), 1, 0)})


def test_no_deltas_or_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there are no deltas to add\. Name at least one folder"):
        apply(tiny_llama(), [])
    with pytest.raises(TypeError, match="deltas are folders or mappings of names to SparseDelta, not int"):
        apply(tiny_llama(), [3])  # type: ignore[list-item]
