"""Who holds a model: one HiFT at a time, until it is detached or dropped; then the model is as it was before.

And a model that is changed under HiFT: an error at the next training forward names parameter, cause and way out.
"""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from slivertune import SFT, HiFT, HiFTConfig, SFTConfig
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.sliver import IDLE_STEPS
from tests.helpers.models import (
    LAYERS,
    assert_same_bits,
    differing,
    small_decoder,
    tiny_bert,
    token_batches,
    trainable,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.reference import train
from tests.hift.cases import hift_over, said


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.filterwarnings("ignore:1 of")
@pytest.mark.parametrize("gradients", ["device", "host", "stepped"])
def test_detach_gives_back_what_was_free_and_takes_every_hook_away(gradients: Any) -> None:
    model = small_decoder()
    model.get_parameter("model.layers.1.mlp.up_proj.weight").requires_grad_(False)
    free = trainable(model)
    _, hift = hift_over(model, torch.optim.AdamW, gradients=gradients, lr=1e-2)
    assert hooks_of(model)
    train(model, hift, token_batches(2), 2)
    hift.detach()
    assert trainable(model) == free and hooks_of(model) == 0
    model.requires_grad_(False)
    hift.detach()
    assert trainable(model) == set(), "the second call has nothing to give back"
    with pytest.raises(RuntimeError, match=r"after detach\(\).*reattach"):
        hift.step()


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_after_detach_a_checkpointed_model_whose_embedding_is_frozen_trains_as_before(use_reentrant: bool) -> None:
    model, batch = small_decoder(), token_batches(1)[0]
    enable_checkpointing(model, {"use_reentrant": use_reentrant})
    functions = [getattr(module, "_gradient_checkpointing_func", None) for module in model.modules()]
    model.get_input_embeddings().requires_grad_(False)
    num_hooks = hooks_of(model)
    with pytest.warns(UserWarning, match="HiFT keeps them frozen"):
        model, hift = hift_over(model, torch.optim.AdamW, lr=1e-2)
    train(model, hift, [batch] * 2, 2)
    hift.detach()
    hift.reattach()
    train(model, hift, [batch] * 2, 2)
    hift.detach()
    assert hooks_of(model) == num_hooks
    assert [getattr(module, "_gradient_checkpointing_func", None) for module in model.modules()] == functions
    model(**batch).loss.backward()
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


def test_after_a_turn_that_could_not_begin_detach_takes_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small_decoder(), token_batches(1)[0]
    num_hooks = hooks_of(model)
    model, hift = hift_over(model, torch.optim.AdamW, lr=1e-2)
    hift.detach()

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as failing:
        failing.setattr(hift.turns.hooks, "activate", fail)
        with pytest.raises(torch.OutOfMemoryError):
            hift.reattach()
    with pytest.raises(ValueError, match=r"trained by another HiFT"):
        HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    hift.detach()
    assert hooks_of(model) == num_hooks and all(each.requires_grad for each in model.parameters())
    hift.reattach()
    train(model, hift, [batch] * 2, 2)
    hift.detach()
    assert hooks_of(model) == num_hooks


@pytest.mark.parametrize("what", ["the model", "a part of it", "a wrapper of it"])
def test_a_second_hift_over_a_held_model_is_refused(what: str) -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    free = trainable(model)
    target = {"the model": model, "a part of it": model.model, "a wrapper of it": nn.Sequential(model)}[what]
    with pytest.raises(ValueError, match=r"trained by another HiFT.*detach\(\)"):
        HiFT(target, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    with pytest.raises(ValueError, match=r"detach\(\)"):
        HiFT.wrap(torch.optim.AdamW(target.parameters(), lr=1e-2), target, config=HiFTConfig.paper())
    assert trainable(model) == free
    hift.detach()
    again = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    assert trainable(model) == set(again.groups[0].parameter_names)


def test_hift_and_sft_do_not_share_a_model() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    with pytest.raises(ValueError, match=r"trained by another HiFT.*SFT can't train it.*detach\(\)"):
        SFT(model, config=SFTConfig(density=0.1), lr=1e-2, total_steps=10)
    hift.detach()
    sft = SFT(model, config=SFTConfig(density=0.1), lr=1e-2, total_steps=10)
    with pytest.raises(ValueError, match=r"trained by another SFT.*HiFT can't train it.*detach\(\)"):
        HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    sft.detach()
    assert HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2).num_groups == LAYERS


@pytest.mark.parametrize("with_schedule", [False, True])
@pytest.mark.parametrize("gradients", ["device", "host", "stepped"])
def test_an_optimizer_that_was_dropped_holds_nothing(gradients: Any, with_schedule: bool) -> None:
    model = small_decoder()
    everything = trainable(model)
    _, hift = hift_over(model, torch.optim.AdamW, gradients=gradients, lr=1e-2)
    schedule = LambdaLR(hift, lambda step: 1.0) if with_schedule else None
    train(model, hift, token_batches(2), 2)
    gone = weakref.ref(hift)
    del hift, schedule
    second = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    assert gone() is None
    assert trainable(model) == set(second.groups[0].parameter_names)
    del second
    gc.collect()
    assert trainable(model) == everything and hooks_of(model) == 0


def test_a_refused_hift_holds_nothing() -> None:
    model = small_decoder()
    with pytest.raises(ValueError, match="layers_per_group"):
        hift_over(model, torch.optim.AdamW, layers_per_group=9, lr=1e-2)
    HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2).detach()


@rotated(config=[{}, {"gradients": "stepped"}, {"state": "device"}], dtype=[torch.bfloat16, torch.float32])
def test_reattach_goes_on_to_the_bit(dtype: torch.dtype, config: dict[str, Any]) -> None:
    (model, hift), (other, whole) = (
        hift_over(small_decoder(dtype), torch.optim.AdamW, lr=1e-2, **config) for _ in range(2)
    )
    batches = token_batches(12)
    train(model, hift, batches, 7)
    hift.detach()
    hift.load_state_dict(hift.state_dict())
    assert trainable(model) == set(weights(model)), "loading freezes nothing"
    blocker = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    with pytest.raises(ValueError, match="trained by another HiFT"):
        hift.reattach()
    blocker.detach()
    hift.reattach()
    hift.reattach()
    train(model, hift, batches, 5, start=7)
    train(other, whole, batches, 12)
    assert_same_bits(model, other)
    assert hift.updates == 12


def test_reattach_refuses_a_model_whose_parameters_were_replaced() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    hift.detach()
    model.lm_head = nn.Linear(32, 97, bias=False)
    with pytest.raises(RuntimeError, match=r"^lm_head\.weight, .*no longer in the model"):
        hift.reattach()
    assert trainable(model) == set(weights(model))


def test_a_dense_run_after_detach_trains_everything() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    train(model, hift, token_batches(3), 3)
    hift.detach()
    other = twin(model)
    for trained in (model, other):
        train(trained, torch.optim.AdamW(trained.parameters(), lr=1e-2), token_batches(3), 3)
    assert_same_bits(model, other)


@pytest.mark.parametrize("in_backward", [False, True], ids=["after the backward", "in the backward"])
@pytest.mark.parametrize("gradients", ["device", "host", "stepped"])
def test_the_step_of_another_optimizer_is_refused_until_detach(gradients: Any, in_backward: bool) -> None:
    """As of the optimizer that HiFT has wrapped, or of one that steps each weight by a hook of its own."""
    model = small_decoder()
    other, elsewhere = (
        torch.optim.SGD(model.parameters(), lr=1.0),
        torch.optim.SGD(small_decoder().parameters(), lr=1.0),
    )
    stepped = model.parameters() if in_backward else ()
    handles = [each.register_post_accumulate_grad_hook(lambda _: other.step()) for each in stepped]
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(gradients=gradients), lr=1e-2)
    before, batch = weights(model), token_batches(1)[0]

    def train_by_other() -> None:
        model(**batch).loss.backward()
        other.step()

    with pytest.raises(RuntimeError, match=r"SGD would step model\.embed_tokens\.weight, which HiFT trains .*detach"):
        train_by_other()
    elsewhere.step()
    if gradients != "stepped":  # where HiFT has stepped in the backward
        assert differing(weights(model), before) == []
    hift.detach()
    for handle in handles:
        handle.remove()
    train_by_other()


def test_steps_that_never_find_a_gradient_are_said_once() -> None:
    model, batch = small_decoder(), token_batches(1)[0]
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * IDLE_STEPS):
            model(**batch).loss.backward()
            hift.zero_grad()
            hift.step()
    idle = [str(each.message) for each in caught if "none of the last 20 calls of step() was an update" in str(each)]
    assert len(idle) == 1 and "group 0 (model.embed_tokens.weight, ...) had no gradient" in idle[0]
    assert hift.updates == 0


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_can_not_be_copied_and_says_what_can(how: Any) -> None:
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        how(HiFT(small_decoder(), torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2))


def test_a_copy_of_the_model_is_free_of_hift_and_trains_alone() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, layers_per_group=LAYERS, lr=1e-2)
    copied = pickle.loads(pickle.dumps(twin(model)))
    before = weights(model)
    train(copied, torch.optim.AdamW(copied.parameters(), lr=1e-2), token_batches(2), 2)
    assert differing(weights(model), before) == []
    HiFT(twin(model), torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    assert hift.updates == 0


def new_head(model: Any) -> None:
    model.lm_head = nn.Linear(32, 97, bias=False)


def tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def drop_a_block(model: Any) -> None:
    model.model.layers = model.model.layers[:2]


def new_block(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])


GONE = r"which HiFT trains, is no longer in the model"
# transformers gives the embedding's own parameter other values, and the model another head.
RESIZED = r"had shape \(97, 32\) when HiFT was built and has \(101, 32\) now \(resize_token_embeddings\)"
REPLACED: dict[str, tuple[Callable[[Any], object], str]] = {
    "resized embeddings": (
        lambda model: model.resize_token_embeddings(101, mean_resizing=False),
        rf"model\.embed_tokens\.weight {RESIZED}",
    ),
    "a new head": (new_head, rf"lm_head\.weight, {GONE}"),
    "assigned weights": (
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
        rf"model\.embed_tokens\.weight, {GONE}",
    ),
    "a head that is tied now": (tie, rf"lm_head\.weight, {GONE}"),
    "a block less": (drop_a_block, rf"model\.layers\.2\.self_attn\.q_proj\.weight, {GONE}"),
    "another block": (new_block, rf"model\.layers\.1\.self_attn\.q_proj\.weight, {GONE}"),
    "offloaded weights": (
        lambda model: cpu_offload(model, torch.device("cpu")),
        rf"model\.embed_tokens\.weight, {GONE}",
    ),
}


@rotated(what=REPLACED, gradients=["device", "host", "stepped"])
def test_a_parameter_that_was_replaced_or_resized_is_named(what: str, gradients: Any) -> None:
    change, message = REPLACED[what]
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, gradients=gradients, lr=1e-2)
    train(model, hift, token_batches(1), 1)
    change(model)
    with pytest.raises(RuntimeError, match=rf"^{message}.*detach\(\)"):
        model(**token_batches(1)[0])
    hift.detach()
    if what != "offloaded weights":
        again = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
        train(model, again, token_batches(1), again.num_groups)
        assert again.updates == again.num_groups


CASTS = {
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "a part": lambda model: model.lm_head.bfloat16(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_parameter_that_was_cast_is_named(cast: str) -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    train(model, hift, token_batches(1), 1)
    CASTS[cast](model)
    name = "lm_head" if cast == "a part" else "model.embed_tokens"
    with pytest.raises(RuntimeError, match=rf"^{name}\.weight was torch\.float32 .* is torch\.\w+ now.*a new HiFT"):
        model(**token_batches(1)[0])


def test_a_cast_to_the_same_dtype_and_a_move_are_nothing() -> None:
    (model, hift), (other, plain) = (hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2) for _ in range(2))
    for update in range(6):
        model.float().to("cpu").train()
        model.tie_weights()
        model.load_state_dict(twin(model).state_dict())
        train(model, hift, token_batches(1), 1, start=update)
        train(other, plain, token_batches(1), 1, start=update)
    assert_same_bits(model, other)


@pytest.mark.parametrize("inside", [False, True])
def test_peft_after_building_is_refused(inside: bool) -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    with said():  # peft asks transformers for what is deprecated
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match=r"lora_A.* came into the model after HiFT was built.*PEFT"):
        (model if inside else wrapped)(**token_batches(1)[0])
    assert hift.updates == 0


def test_a_new_parameter_that_is_frozen_or_elsewhere_is_none_of_hifts_business() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    model.probe = nn.Linear(2, 2).requires_grad_(False)
    train(model, hift, token_batches(2), 2)
    model.probe.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"^probe\.weight and 1 more came into the model"):
        model(**token_batches(1)[0])


def test_evaluation_of_a_changed_model_is_free() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    new_head(model)
    with torch.no_grad():
        model(**token_batches(1)[0])
    assert not hift.is_detached


@pytest.mark.parametrize("kind", ["cpu", "disk", "meta"])
def test_weights_that_lie_elsewhere_are_refused_when_hift_is_built(kind: str, tmp_path: Path) -> None:
    model = small_decoder().to("meta" if kind == "meta" else "cpu")
    if kind == "cpu":
        cpu_offload(model, torch.device("cpu"))
    elif kind == "disk":
        disk_offload(model, str(tmp_path), torch.device("cpu"))
    free = trainable(model)
    with pytest.raises(ValueError, match=r"^model\.embed_tokens\.weight is .*cpu_offload.*Load the whole model"):
        HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    assert trainable(model) == free


def test_a_frozen_backbone_may_lie_elsewhere() -> None:
    model = tiny_bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))
    cpu_offload(model.bert, torch.device("cpu"))
    with pytest.warns(UserWarning, match="frozen"):
        hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    assert hift.num_groups == 1 and weights(model)
