"""Whatever happens to the model between steps, the next one trains what SFT says, or says why not.

One long file: what one engineer does to a model has many forms, all of which end in the same few lines.
"""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import slivertune
from slivertune import SFT, SFTConfig
from slivertune.core import foreign_steps, parameters
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.weak_members import living
from tests.helpers.models import (
    HIDDEN,
    VOCAB,
    assert_same_bits,
    assert_same_tree,
    bits,
    differing,
    small_decoder,
    tiny_llama,
    token_batches,
    trainable,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.tolerance import assert_step_close
from tests.sft.reference import FixedAdamW
from tests.sft.runs import over, sft_over, train

FORMS = ["optimizer", "layer"]
SELECTIONS = ["accumulated_gradient", "momentum"]


make, made = partial(sft_over, estimation_steps=2), partial(over, estimation_steps=2)


def load(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(values, strict=False)


def of_each(put: Callable[[nn.Parameter, torch.Tensor], object]) -> Callable[..., None]:
    def put_all(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            put(model.get_parameter(name), value)

    return put_all


@of_each
def copy_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """As averaging libraries put their weights in; no version of a tensor tells."""
    parameter.data.copy_(value)


@of_each
def replace_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.data = value.clone()


@of_each
def copy_in_place(parameter: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


@pytest.mark.parametrize("put", [load, copy_data, copy_in_place, replace_data])
def test_training_goes_on_from_weights_that_are_put_in_between_steps(put: Callable[..., None]) -> None:
    """As a plain optimizer does: AdamW with a masked gradient, given the same weights, and the moments it had."""
    model = small_decoder()
    before, new = twin(model), weights(small_decoder(seed=5))
    optimizer = make(model, reselection_interval=0)
    batches = token_batches(12)

    def by_adamw(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        other = twin(before).to(dtype)
        reference = FixedAdamW(other, optimizer.deltas(), lr=1e-2)
        reference.train(batches[:6])
        load(other, new)
        reference.train(batches[6:])
        return {name: other.get_parameter(name).detach() for name in reference.masks}

    expected, exact = (by_adamw(dtype) for dtype in (torch.float32, torch.float64))
    train(model, optimizer, batches[:6])
    put(model, new)
    train(model, optimizer, batches[6:])
    # AdamW adds each update to a weight, SFT to a delta that is added once: the updates themselves are rounded
    # otherwise, too. An update is up to 1e-2.
    assert_step_close({name: model.get_parameter(name) for name in expected}, expected, exact, cap=1e-4)
    for name, delta in optimizer.deltas().items():
        assert torch.equal(optimizer.base_values()[name], new[name].view(-1)[delta.indices.long()])
    optimizer.detach(merge=False)
    assert differing(weights(model), new) == []


def test_loading_the_pretrained_weights_starts_from_them() -> None:
    before = weights(small_decoder())
    model, optimizer = made(small_decoder())
    train(model, optimizer, token_batches(4))
    load(model, before)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, token_batches(1))
    assert {name: value for name, value in weights(model).items() if "slivertune" not in name}.keys() == before.keys()
    assert not any(delta.values.any() for delta in optimizer.deltas().values())
    assert all(torch.equal(model.get_parameter(name), value) for name, value in before.items())


@rotated(dtype=[torch.float32, torch.bfloat16], form=FORMS)
def test_putting_in_what_the_model_holds_or_swapping_weights_and_back_changes_nothing(
    dtype: torch.dtype, form: str
) -> None:
    (model, optimizer), (other, untouched) = (made(small_decoder(dtype), form=form) for _ in range(2))
    batches = token_batches(12)
    train(other, untouched, batches)
    train(model, optimizer, batches[:5])
    load(model, copy.deepcopy(model.state_dict()))
    train(model, optimizer, batches[5:8])
    held = copy.deepcopy(model.state_dict())
    load(model, {name: value * 0.5 for name, value in held.items()})
    with torch.no_grad():
        model(**batches[0])
    optimizer.state_dict()
    load(model, held)
    train(model, optimizer, batches[8:])
    assert_same_bits(model, other)
    assert_same_tree(optimizer.state_dict(), untouched.state_dict())


def test_the_layer_form_adds_its_deltas_to_weights_that_are_loaded() -> None:
    new = weights(small_decoder(seed=5))
    model, optimizer = made(small_decoder(), form="layer")
    train(model, optimizer, token_batches(4))
    load(model, new)
    deltas = optimizer.deltas()
    optimizer.detach()
    for name, delta in deltas.items():
        new[name].view(-1)[delta.indices.long()] += delta.values
        assert torch.equal(bits(model.get_parameter(name)), bits(new[name]))


def test_deltas_are_not_saved_while_others_weights_are_in_the_model(tmp_path: Path) -> None:
    model, optimizer = made(small_decoder())
    train(model, optimizer, token_batches(4))
    held = copy.deepcopy(model.state_dict())
    load(model, weights(small_decoder(seed=5)))
    for act in (optimizer.deltas, lambda: optimizer.save_pretrained(tmp_path / "deltas")):
        with pytest.raises(RuntimeError, match=r"of .* trained entries of .*q_proj\.weight were changed outside of"):
            act()
    load(model, held)
    optimizer.save_pretrained(tmp_path / "deltas")
    train(model, optimizer, token_batches(1))


def test_deltas_after_a_step_belong_to_the_weights_that_were_loaded(tmp_path: Path) -> None:
    model, base = small_decoder(), small_decoder(seed=5)
    optimizer = make(model)
    train(model, optimizer, token_batches(4))
    load(model, weights(base))
    train(model, optimizer, token_batches(8))
    optimizer.save_pretrained(tmp_path / "deltas")
    optimizer.detach()
    with slivertune.deltas.apply(base, tmp_path / "deltas"):
        assert_same_bits(model, base)


def test_a_state_is_refused_once_the_weights_belong_to_another_base() -> None:
    model, optimizer = made(small_decoder(), reselection_interval=0)
    train(model, optimizer, token_batches(4))
    state = copy.deepcopy(optimizer.state_dict())
    load(model, weights(small_decoder(seed=5)))
    with pytest.raises(ValueError, match="belong to other pretrained values than the model has"):
        optimizer.load_state_dict(state)


def resize(model: Any) -> None:
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)


def new_layer(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(HIDDEN, 48, bias=False)


def new_parameter(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def assign(model: Any) -> None:
    model.load_state_dict(model.state_dict(), assign=True)


def offload(model: Any) -> None:
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def adapt(model: Any) -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))


def new_head(model: Any) -> None:
    model.score = nn.Linear(HIDDEN, 3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("act", "text"),
    [
        (resize, r"lm_head\.weight was replaced after SFT was built"),
        (new_layer, r"layers\.1\.mlp\.up_proj\.weight was replaced after SFT was built.*detach\(\)"),
        (new_parameter, r"layers\.1\.mlp\.up_proj\.weight was replaced after SFT was built"),
        (assign, r"weight was replaced after SFT was built.*load_state_dict\(assign=True\)"),
        (offload, r"weight was replaced after SFT was built.*an offload"),
        (adapt, r"q_proj\.lora_A\.default\.weight came into the model after SFT was built and requires a gradient"),
        (new_head, r"score\.weight came into the model after SFT was built.*targets"),
        (lambda model: model.to(torch.bfloat16), r"weight was torch\.float32 when .* is torch\.bfloat16 now\. Cast"),
        (lambda model: model.half(), r"weight was torch\.float32 when SFT was built and is torch\.float16 now"),
    ],
)
def test_a_trained_tensor_that_is_replaced_cast_or_added_is_named_in_the_next_forward_and_step(
    form: str, act: Callable[[Any], None], text: str
) -> None:
    model, optimizer = made(small_decoder(), form=form, targets=[nn.Linear], embeddings=form == "optimizer")
    batch = token_batches(1)[0]
    train(model, optimizer, [batch])
    model(**batch).loss.backward()
    act(model)
    for call in (partial(model, **batch), optimizer.step):
        with pytest.raises(RuntimeError, match=text):
            call()
    optimizer.detach(merge=act is not offload or form == "optimizer")
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_an_embedding_that_was_resized_in_place_is_named() -> None:
    model, optimizer = made(small_decoder(tied=True), embeddings=True)
    resize(model)
    with pytest.raises(RuntimeError, match=r"embed_tokens\.weight had shape \(97, 32\) .*and has \(100, 32\) now"):
        train(model, optimizer, token_batches(1))


def test_a_cast_is_allowed_for_what_is_not_trained_and_for_evaluation() -> None:
    model, optimizer = made(small_decoder(torch.bfloat16))
    model.lm_head.float()
    model.lm_head.bfloat16()
    train(model, optimizer, token_batches(2))
    model.float()
    with torch.no_grad():
        model(**token_batches(1)[0])
    model.bfloat16()
    before = optimizer.updates
    train(model, optimizer, token_batches(2))
    assert optimizer.updates == before + 2


@rotated(
    checkpointing=[None, False, True],
    form=FORMS,
    requires_grad=[True, False],
    when=["before forward", "before backward"],
)
def test_requires_grad_of_others_changes_neither_the_update_nor_the_norm(
    checkpointing: bool | None, form: str, requires_grad: bool, when: str
) -> None:
    models = [small_decoder() for _ in range(2)]
    norms: list[list[float]] = [[], []]
    for model, found, meddles in zip(models, norms, (False, True), strict=True):
        optimizer = make(model, form=form)
        if checkpointing is not None:
            enable_checkpointing(model, {"use_reentrant": checkpointing})
            if checkpointing:
                model.enable_input_require_grads()
        for batch in token_batches(8):
            if meddles and when == "before forward":
                model.requires_grad_(requires_grad)
            loss = model(**batch).loss
            if meddles and when == "before backward":
                model.requires_grad_(requires_grad)
            loss.backward()
            found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            assert all("slivertune_sft" in name for name, p in model.named_parameters() if p.grad is not None)
            optimizer.step()
        optimizer.detach()
    assert norms[0] == norms[1]
    assert_same_bits(*models)


def test_what_a_call_past_the_model_gathers_is_dropped_before_it_is_clipped() -> None:
    """A backbone that is called by itself passes the model's hook; the next forward of the model drops what it left."""
    model = tiny_llama()
    make(model)
    model.requires_grad_(True)
    model.model(token_batches(1)[0]["input_ids"]).last_hidden_state.sum().backward()
    assert model.model.norm.weight.grad is not None
    model(**token_batches(1)[0])
    assert model.model.norm.weight.grad is None and not model.model.norm.weight.requires_grad


def test_another_optimizer_that_holds_what_is_trained_is_refused_before_it_steps() -> None:
    model = small_decoder()
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = make(model)
    late = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1.0)
    other = torch.optim.AdamW(small_decoder().parameters(), lr=1.0)
    model(**token_batches(1)[0]).loss.backward()
    before = weights(model)
    for each in (early, late):
        with pytest.raises(RuntimeError, match=r"(SGD|AdamW) would step .*q_proj\.weight, which SFT.*detach\(\)"):
            each.step()
    other.step()
    assert differing(weights(model), before) == []
    optimizer.step()
    optimizer.detach()
    early.step()


@pytest.mark.parametrize("form", FORMS)
def test_deltas_that_a_script_writes_are_named(form: str) -> None:
    """As in a loop that does its own gradient descent over `model.parameters()`."""
    model, optimizer = made(small_decoder(), form=form)
    batch = token_batches(1)[0]
    model(**batch).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    for act in (lambda: model(**batch), optimizer.step):
        with pytest.raises(
            RuntimeError, match=r"the deltas of .*q_proj\.weight were written by something else.*detach"
        ):
            act()


def test_a_plain_trainer_after_a_trainer_with_sft_is_refused_until_sft_is_detached(tmp_path: Path) -> None:
    model = small_decoder()
    data = [{key: value[0] for key, value in batch.items()} for batch in token_batches(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer = partial(transformers.Trainer, model=model, args=arguments, train_dataset=data)
    first = trainer()
    attached = slivertune.attach(first, SFTConfig(density=0.1))
    first.train()
    optimizer = attached.optimizer
    assert isinstance(optimizer, SFT) and optimizer.updates == 2
    first.evaluate(data)
    optimizer.save_pretrained(tmp_path / "deltas")
    with pytest.raises(RuntimeError, match=r"AdamW would step .*which SFT trains.*slivertune\.attach returned"):
        trainer().train()
    attached.detach()
    before = weights(model)
    trainer().train()
    assert len(differing(weights(model), before)) == len(before)


@pytest.mark.parametrize("form", FORMS)
def test_a_forgotten_sft_leaves_nothing_behind_once_its_model_is_gone(form: str) -> None:
    gc.collect()
    num_guarded = len(living(foreign_steps._guards))
    model, optimizer = made(small_decoder(), form=form)
    train(model, optimizer, token_batches(1))
    num_hooks = len(_global_optimizer_pre_hooks)
    assert len(living(foreign_steps._guards)) == num_guarded + 1
    reference = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert reference() is None
    assert len(living(foreign_steps._guards)) == num_guarded and len(_global_optimizer_pre_hooks) == num_hooks


@pytest.mark.parametrize("form", FORMS)
def test_an_sft_may_be_collected_while_another_optimizer_steps(form: str) -> None:
    # As when the cell of a notebook runs twice: the garbage collector takes the first when it likes.
    forgotten = [made(small_decoder(), form=form)]
    reference = weakref.ref(forgotten[0][0])

    def forget(*ignored: Any) -> None:
        forgotten.clear()
        gc.collect()

    # The step goes on to another hook after it.
    handles = [register_optimizer_step_pre_hook(hook) for hook in (forget, lambda *ignored: None)]
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    try:
        torch.optim.SGD([parameter], lr=1.0).step()
    finally:
        for handle in handles:
            handle.remove()
    assert reference() is None and torch.equal(parameter.detach(), torch.zeros(3))


class OtherOwner:
    """Another optimizer that has registered what it trains, as HiFT does."""


def test_a_model_that_another_optimizer_holds_is_refused_and_sft_registers_what_it_holds() -> None:
    model, other = small_decoder(), OtherOwner()
    parameters.take(model.parameters(), other)
    before = trainable(model)
    with pytest.raises(ValueError, match=r"is trained by another OtherOwner.* so SFT can't train it\. Call detach\(\)"):
        make(model)
    assert trainable(model) == before
    parameters.release(model.parameters(), other)
    optimizer = make(model)
    assert all(parameters.owner_of(parameter) is optimizer for parameter in model.parameters())
    optimizer.detach()
    assert not any(parameters.owner_of(parameter) for parameter in model.parameters())


def test_after_detach_a_step_is_an_error_and_the_model_as_before() -> None:
    model = small_decoder()
    model.model.norm.requires_grad_(False)
    before = trainable(model)
    optimizer = make(model)
    train(model, optimizer, token_batches(2))
    model.requires_grad_(True)
    optimizer.detach()
    optimizer.detach()
    assert trainable(model) == before
    with pytest.raises(RuntimeError, match=r"step\(\) was called after detach\(\)"):
        optimizer.step()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("merge", [True, False])
def test_after_detach_nothing_is_saved_that_would_not_be_the_trained_deltas(
    merge: bool, form: str, tmp_path: Path
) -> None:
    model = small_decoder()
    optimizer = make(model, form=form)
    train(model, optimizer, token_batches(2))
    optimizer.detach(merge=merge)
    saves = (optimizer.state_dict, optimizer.deltas, optimizer.base_values)
    for save in (*saves, partial(optimizer.save_pretrained, tmp_path / "deltas")):
        with pytest.raises(RuntimeError, match=r"came after detach\(\).*Save before detach\(\)"):
            save()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_backward_before_sft_are_none_of_its_deltas(form: str) -> None:
    norms, batch = list[list[torch.Tensor]](), token_batches(1)[0]
    for is_stale in (False, True):
        model = small_decoder()
        if is_stale:
            (model(**batch).loss * 100).backward()
        optimizer = make(model, form=form)
        norms.append([])
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            norms[-1].append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
    assert_same_tree(norms[0], norms[1])


class TwoTowers(nn.Module):
    """A text tower, and another that a batch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, text: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.text(text)
        return hidden.sum() if image is None else (hidden * self.image(image)).sum()


def tower_batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_that_reaches_nothing_is_no_update_and_said_at_once_and_if_it_lasts(form: str) -> None:
    model, optimizer = made(TwoTowers(), targets=["image"], density=0.5, form=form)
    before = weights(model)
    for count, steps in ((1, "this step"), (18, None), (1, "the last 20 steps")):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            train(model, optimizer, tower_batches(count))
        said = [str(each.message) for each in found]
        assert len(said) == (steps is not None)
        assert not said or said[0].startswith("no gradient has reached any of the 1 trained tensors (the first is ")
        assert not said or f"image.weight) in {steps}, " in said[0]
    assert optimizer.updates == 0 and differing(weights(model), before) == []
    train(lambda batch: model(batch, batch), optimizer, [torch.ones(3, 4)])
    assert optimizer.updates == 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_tensor_that_no_batch_reaches_keeps_its_positions_and_bits(selection: str, packed: bool) -> None:
    options = {"targets": ["image", "text"], "density": 0.25, "replacement_rate": 1.0}
    model, optimizer = made(TwoTowers(), selection=selection, packed=packed, **options)
    before, first = weights(model), optimizer.deltas()
    train(model, optimizer, tower_batches(19))
    with pytest.warns(UserWarning, match=r"no gradient has reached image\.weight in the first 20 updates"):
        train(model, optimizer, tower_batches(1))
    after = optimizer.deltas()
    assert optimizer.updates == 20
    assert torch.equal(after["image.weight"].indices, first["image.weight"].indices)
    assert torch.equal(bits(model.image.weight), bits(before["image.weight"]))
    assert not torch.equal(after["text.weight"].indices, first["text.weight"].indices)
    train(lambda batch: model(batch, batch + 1), optimizer, tower_batches(16))
    assert not torch.equal(optimizer.deltas()["image.weight"].indices, first["image.weight"].indices)
    assert all(delta.values.isfinite().all() for delta in optimizer.deltas().values())


@pytest.mark.parametrize("act", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_of_sft_is_refused_naming_what_to_save(act: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"SFT can't be copied or pickled.*Save state_dict\(\)"):
        act(make(small_decoder()))


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_of_the_model_computes_the_same_and_is_not_guarded(form: str) -> None:
    model, optimizer = made(small_decoder(), form=form)
    train(model, optimizer, token_batches(3))
    other = copy.deepcopy(model)
    batch = token_batches(1)[0]
    assert torch.equal(other(**batch).loss, model(**batch).loss)
    other.score = nn.Linear(3, 3)
    other(**batch)
    if form == "optimizer":
        pickle.loads(pickle.dumps(model))(**batch)


@pytest.mark.parametrize(
    "move",
    [
        lambda model, folder: model.to("meta"),
        lambda model, folder: offload(model),
        lambda model, folder: accelerate.disk_offload(model, folder, execution_device=torch.device("cpu")),
    ],
    ids=["meta", "cpu_offload", "disk_offload"],
)
def test_weights_without_data_are_refused(move: Callable[[nn.Module, str], object], tmp_path: Path) -> None:
    model = small_decoder()
    move(model, str(tmp_path / "weights"))
    with pytest.raises(ValueError, match=r"q_proj\.weight is on the meta device.*cpu_offload, disk_offload"):
        make(model)


@pytest.mark.parametrize("was_frozen", [False, True])
def test_an_optimizer_of_what_sft_has_frozen_is_refused(was_frozen: bool) -> None:
    towers = TwoTowers()
    towers.text.requires_grad_(not was_frozen)
    model, optimizer = made(towers, targets=["image"], density=0.5)
    other = torch.optim.SGD(model.text.requires_grad_(True).parameters(), lr=0.1)
    train(lambda batch: model(batch, batch), optimizer, tower_batches(1))
    with pytest.raises(RuntimeError, match=r"SGD would step text\.weight, which SFT keeps frozen"):
        other.step()
    optimizer.detach()
    model(*tower_batches(2)).backward()
    other.step()


def test_momentum_that_a_scheduler_sets_has_to_be_sfts() -> None:
    model, optimizer = made(TwoTowers(), targets=["image"], density=0.5, selection="momentum")
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
    with pytest.raises(RuntimeError, match=r"momentum was set to 0\.95 after SFT was built without it"):
        train(lambda batch: model(batch, batch), optimizer, tower_batches(1))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_update_whose_gradients_are_zeroed_in_place_is_abandoned(set_to_none: bool) -> None:
    positions = []
    for abandons in (False, True):
        torch.manual_seed(0)
        model, optimizer = made(small_decoder(), total_steps=40)
        for number, batch in enumerate(token_batches(8)):
            if abandons and number in (1, 2):
                model(**token_batches(3)[2]).loss.backward()
                model.zero_grad(set_to_none=set_to_none)
            train(model, optimizer, [batch])
        positions.append({name: each.indices for name, each in optimizer.deltas().items()})
    assert differing(*positions) == []


@pytest.mark.parametrize("edit", [lambda g: g.add_(1e-6), torch.Tensor.sign_, lambda g: g.div_(g.norm() + 1e-12)])
def test_gradients_that_are_changed_without_a_common_factor_are_estimated_as_they_came(edit: Any) -> None:
    model, optimizer = over(small_decoder())
    for batch in token_batches(4):
        assert optimizer.is_estimating
        model(**batch).loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                edit(parameter.grad)
        optimizer.step()
    assert optimizer.metrics()["reselections"] == 1
    states = optimizer.state_dict()["state"].values()
    assert all(each["exp_avg_sq"].isfinite().all() and each["exp_avg_sq"].max() < 1 for each in states)
    train(model, optimizer, token_batches(1))
    assert all(each.values.ne(0).any() for each in optimizer.deltas().values())
