"""Parked layers under all that trains beside them, against dense models whose weights are quantised by hand."""

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.pytorch_utils import Conv1D

from slivertune import SFT, HiFT, HiFTConfig, SFTConfig, TokenTune, park_layers
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.layers import find_blocks
from slivertune.core.torch_internals import saved_tensors_hooks_now
from slivertune.parked import exact_source, streamed_model
from tests.helpers.delayed_streams import delayed
from tests.helpers.models import (
    bits,
    differing,
    tiny_gpt2,
    tiny_llama,
    tiny_mixtral,
    token_batches,
    weights,
)
from tests.helpers.pairwise import drawn_rows, pairwise_rows, row_params
from tests.helpers.reference import quantized_by_hand

BATCHES = token_batches(8)
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "llama": lambda dtype: tiny_llama(dtype, blocks=4),
    "gpt2": tiny_gpt2,
    "mixtral": tiny_mixtral,
}


def with_lora(model: nn.Module, **settings: Any) -> nn.Module:
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": "gaussian", **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated, and names Conv1D's layout
        torch.manual_seed(0)
        return get_peft_model(model, config)  # type: ignore[arg-type]


def with_upper_half(model: nn.Module) -> nn.Module:
    """Freeze the lower blocks and the embeddings."""
    blocks = find_blocks(model)
    model.requires_grad_(False)
    for _, block in blocks[len(blocks) // 2 :]:
        block.requires_grad_(True)
    return model


def with_norms(model: nn.Module) -> nn.Module:
    """Freeze all but the norms, so that each block has weights of both kinds."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "ln_" in name)
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "lora": with_lora,
    "upper half": with_upper_half,
    "norms": with_norms,
    "tokentune x lora": with_lora,
    "hift x lora": with_lora,
    "sft": lambda model: model,
}


def by_hand(model: nn.Module, form: str, *, all_of_them: bool = False) -> nn.Module:
    """A copy whose frozen linear weights in blocks are dense ones, made from codes."""
    return made_by_hand(copy.deepcopy(model), form, all_of_them=all_of_them)


def made_by_hand(model: nn.Module, form: str, *, all_of_them: bool = False) -> nn.Module:
    """The model itself, with such weights."""
    for module in {module for _, block in find_blocks(model) for module in block.modules()}:
        if type(module) in (nn.Linear, Conv1D) and (all_of_them or not module.weight.requires_grad):
            module.weight.data = quantized_by_hand(module.weight.data, form)
    return model


def optimizer_of(model: nn.Module, way: str) -> Any:
    if way == "hift x lora":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that the base stays frozen
            return HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    if way == "sft":
        phases: Any = {"reselection_interval": 3, "estimation_steps": 2}
        config = SFTConfig(form="layer", density=0.1, targets=["q_proj", "v_proj"], **phases)
        return SFT(model, config=config, lr=1e-2, total_steps=20)
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def trained(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> list[Any]:
    """Losses and gradients of some updates, with two micro-batches in every other one."""
    seen: list[Any] = []
    for step in range(start, start + steps):
        for micro in range(1 + step % 2):
            loss = model(**BATCHES[(2 * step + micro) % len(BATCHES)]).loss
            loss.backward()
            seen.append(loss.item())
        seen += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def with_deltas(exact: Any, deltas: Any, others: Any) -> dict[str, torch.Tensor]:
    """The exact weights with SFT's deltas added in fp32 and rounded once. The other run has the same deltas."""
    summed = {}
    for name, delta in deltas.items():
        assert torch.equal(delta.values, others[name].values) and torch.equal(delta.indices, others[name].indices)
        flat = exact[name].clone().flatten()
        flat[delta.indices.long()] = (flat[delta.indices.long()].float() + delta.values).to(flat.dtype)
        summed[name] = flat.view(exact[name].shape)
    return summed


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(bits(a), bits(b)) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


FACTORS: dict[str, Any] = {
    "way": WAYS,
    "storage": [("exact", "host"), ("int8", "device"), ("int8", "host"), ("nf4", "device"), ("nf4", "host")],
    "checkpointing": [None, True, False],
    "dtype": [torch.float32, torch.bfloat16],
    "family": FAMILIES,
    "resident_bytes": [0, 20_000],
}


def is_legal(row: Any) -> bool:
    return (row.get("way"), row.get("family")) != ("sft", "gpt2")  # the layer form takes no Conv1D


@pytest.mark.filterwarnings("ignore:.*are stacks of experts .* and stay exact:UserWarning")
@pytest.mark.parametrize(
    "row", row_params(pairwise_rows(FACTORS, is_legal), drawn_rows(FACTORS, is_legal, num_rows=60, seed=0))
)
def test_training_has_the_bits_of_dense_weights_made_by_hand(row: Any) -> None:
    way, (form, place), checkpointing = row["way"], row["storage"], row["checkpointing"]
    model = WAYS[way](FAMILIES[row["family"]](row["dtype"]))
    exact, dense = weights(model), by_hand(model, form, all_of_them=way == "sft")
    with ExitStack() as stack:
        stack.enter_context(delayed(None))
        own = optimizer_of(model, way) if way == "sft" else None
        handle = park_layers(model, form=form, place=place, resident_bytes=row["resident_bytes"])
        for each in (model, dense):
            if checkpointing is not None:
                inner: Any = each.get_base_model() if hasattr(each, "get_base_model") else each
                enable_checkpointing(inner, {"use_reentrant": checkpointing})
                inner.enable_input_require_grads()
            if way == "tokentune x lora":
                stack.enter_context(TokenTune(ratio=0.5, seed=3).attach(each))
        own, plain = own or optimizer_of(model, way), optimizer_of(dense, way)
        assert same(trained(model, own, 5), trained(dense, plain, 5))
        parked = set(handle.names)
        assert parked
        shown = model.state_dict()
        for name, before in exact.items():
            expected = before if name in parked else dense.get_parameter(name).detach()
            assert torch.equal(bits(shown[name] + 0), bits(expected + 0)), name
        model.eval(), dense.eval()
        with torch.no_grad():
            assert torch.equal(model(**BATCHES[7]).logits, dense(**BATCHES[7]).logits)
        if way == "sft":
            exact |= with_deltas(exact, own.deltas(), plain.deltas())
        if way in ("hift x lora", "sft"):
            own.detach(), plain.detach()
    handle.remove()
    for name, parameter in model.named_parameters():
        expected = exact[name] if name in parked else dense.get_parameter(name)
        assert torch.equal(bits(parameter.detach()), bits(expected.detach())), name


def lora_llama(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    return with_lora(tiny_llama(dtype, blocks=4), **settings)


def loss_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**BATCHES[0]).loss


# ---- what is refused


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "nothing changes": (lora_llama, {"form": "exact", "place": "device"}, "leaves all weights as they are"),
    "an unknown form": (lora_llama, {"form": "int4"}, "form='int4' must be one of"),
    "an unknown place": (lora_llama, {"place": "disk"}, "place='disk' must be one of"),
    "a size that is none": (lora_llama, {"resident_bytes": "much"}, "resident_bytes='much'"),
    "all weights train": (tiny_llama, {}, "no weight in the blocks of LlamaForCausalLM is frozen.*requires_grad_"),
    "DoRA": (lambda: lora_llama(use_dora=True), {}, "'default' uses DoRA.*use_dora=False"),
    "no blocks": (lambda: nn.Linear(4, 4).requires_grad_(False), {}, "Only models with blocks"),
    "codes of fp64": (lambda: lora_llama(torch.float64), {"form": "int8"}, "float64.*to quantise its layers"),
    "a block twice": (lambda: with_shared_blocks(), {}, "layers.0 and is also read outside of it"),
    "shared weights": (lambda: with_shared_weights(), {}, "layers.2 shares .*layers.0.* with another block"),
    "4-bit weights": (lambda: with_codes(), {}, "only floating-point weights can be offloaded"),
}


def with_shared_blocks() -> nn.Module:
    model: Any = tiny_llama(blocks=3).requires_grad_(False)
    model.model.layers[2] = model.model.layers[0]
    return model  # type: ignore[no-any-return]


def with_shared_weights() -> nn.Module:
    model: Any = tiny_llama(blocks=3).requires_grad_(False)
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model  # type: ignore[no-any-return]


def with_codes() -> nn.Module:
    model: Any = tiny_llama(blocks=3).requires_grad_(False)
    codes = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    model.model.layers[1].mlp.up_proj.weight = codes
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_parked_is_refused_and_the_model_stays_as_it_was(case: str) -> None:
    build, settings, message = REFUSED[case]
    model = build()
    before, marks = weights(model), marks_of(model)
    with pytest.raises(ValueError, match=message):
        park_layers(model, **settings)
    assert differing(weights(model), before) == [] and marks_of(model) == marks


def marks_of(model: nn.Module) -> Any:
    """Return the attributes of each module, and the number of its hooks."""
    return {
        name: (set(vars(module)) - {"training"}, len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("settings", [{}, {"form": "int8", "place": "device"}, {"form": "nf4"}], ids=str)
def test_removed_layers_leave_no_trace(settings: Any) -> None:
    model = lora_llama()
    before, marks = weights(model), marks_of(model)
    with park_layers(model, **settings) as handle:
        assert marks_of(model) != marks
        loss_of(model)
    assert differing(weights(model), before) == [] and marks_of(model) == marks
    assert not any(hasattr(each, "_ddp_ignored") for each in model.parameters())
    handle.remove()  # a second time
    with park_layers(model, **settings):
        loss_of(model)
    assert differing(weights(model), before) == []


@pytest.mark.filterwarnings("ignore:.*HiFT keeps them frozen:UserWarning")
def test_what_would_move_or_write_parked_weights_is_refused() -> None:
    model = lora_llama()
    handle = park_layers(model, form="int8", place="device")
    with pytest.raises(ValueError, match=r"is parked already.*before you park the model again"):
        park_layers(model)
    for settings in ({"waiting": "int8"}, {"weights": "host"}):
        with pytest.raises(ValueError, match=r"is parked already.*before you build HiFT with waiting="):
            HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(**settings), lr=1e-3)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(RuntimeError, match=r"can't be merged into parked weights.*remove\(\)"):
            merge()
    handle.remove()
    model.merge_adapter()


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_reads_weights_is_attached_first(init: Any) -> None:
    model = tiny_llama(blocks=3).requires_grad_(False)
    park_layers(model)
    with pytest.raises(ValueError, match=f"attached after the layers were parked, and init_lora_weights='{init}'"):
        loss_of(with_lora(model, init_lora_weights=init))
    model = with_lora(tiny_llama(blocks=3), init_lora_weights=init)
    expected = loss_of(model)
    with park_layers(model):
        assert torch.equal(loss_of(model), expected)


def replace_weight(model: Any) -> None:
    layer = model.base_model.model.model.layers[1].mlp.up_proj.base_layer
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "unfrozen": (lambda model: model.requires_grad_(True), "requires a gradient now.*remove"),
    "replaced": (replace_weight, "was replaced by another parameter.*remove"),
    "cast": (lambda model: model.float(), r"can't become torch.float32|is torch.float32 of shape .* now.*remove"),
    "a replica": (lambda model: model.__dict__.update(_is_replica=True), "DataParallel.*one process for each"),
}


@pytest.mark.parametrize("settings", [{}, {"form": "int8", "place": "device"}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_parked_weights_is_an_error(change: str, settings: Any) -> None:
    model = lora_llama()
    park_layers(model, **settings)
    make, message = CHANGES[change]

    def go_on() -> None:
        make(model)
        loss_of(model)

    with pytest.raises(RuntimeError, match=message):
        go_on()


@pytest.mark.parametrize("storage", FACTORS["storage"], ids=str)
def test_frozen_weights_may_be_in_fp16(storage: Any) -> None:
    model = lora_llama(torch.float16)
    dense = by_hand(model, storage[0])
    park_layers(model, form=storage[0], place=storage[1])
    for each in (model, dense):
        each(**BATCHES[0]).loss.backward()
    assert same(gradients_of(model), gradients_of(dense))


# ---- what counts


def assign(model: Any, name: str, value: torch.Tensor) -> None:
    model.get_parameter(name).data = value


def load(model: Any, name: str, value: torch.Tensor) -> None:
    model.load_state_dict({name: value}, strict=False)


def copy_in_place(model: Any, name: str, value: torch.Tensor) -> None:
    with torch.no_grad():
        model.get_parameter(name).copy_(value)


def break_off(model: Any, moment: str, error: type[BaseException] = KeyboardInterrupt) -> None:
    """End a training step in the feed-forward part of the second block."""

    def fail(*ignored: Any) -> None:
        raise error

    part: Any = model.get_submodule("base_model.model.model.layers.1.mlp")
    hook = part.register_forward_hook(fail) if moment == "forward" else part.register_full_backward_hook(fail)
    with pytest.raises(error):
        model(**BATCHES[0]).loss.backward()
    hook.remove()
    model.zero_grad()


@pytest.mark.parametrize("moment", ["between steps", "forward", "backward"])
@pytest.mark.parametrize("write", [assign, load, copy_in_place])
@pytest.mark.parametrize("settings", [{}, {"form": "int8", "place": "device"}, {"form": "nf4"}], ids=str)
def test_values_that_others_write_count_and_are_saved(settings: Any, write: Any, moment: str) -> None:
    model = lora_llama()
    linear = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"
    # A quantised weight refuses to be written in place.
    norm = "base_model.model.model.layers.1.input_layernorm.weight"
    name = norm if write is copy_in_place and settings.get("form") else linear
    new = torch.randn_like(model.get_parameter(name))
    dense = copy.deepcopy(model)
    dense.get_parameter(name).data = new.clone()
    dense = by_hand(dense, settings.get("form", "exact"))
    handle = park_layers(model, **settings)
    loss_of(model)
    if moment != "between steps":
        break_off(model, moment)
    write(model, name, new.clone())
    assert torch.equal(model.state_dict()[name] + 0, new)
    assert torch.equal(loss_of(model), loss_of(dense))
    assert torch.equal(model.state_dict()[name] + 0, new)
    handle.remove()
    assert torch.equal(model.get_parameter(name).detach(), new)


def test_an_assigned_weight_of_an_idle_layer_of_hift_counts() -> None:
    model = tiny_llama(torch.bfloat16, blocks=3)
    name = "model.layers.1.mlp.up_proj.weight"
    new = torch.randn_like(model.get_parameter(name))
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(waiting="int8"), lr=1e-3)
    loss_of(model)
    model.get_parameter(name).data = new.clone()
    loss_of(model)
    assert torch.equal(model.state_dict()[name] + 0, new)
    hift.detach()
    assert torch.equal(model.get_parameter(name).detach(), new)


@pytest.mark.parametrize("settings", [{}, {"form": "int8", "place": "device"}, {"form": "nf4"}], ids=str)
def test_a_copy_is_exact_and_says_so(settings: Any) -> None:
    model = lora_llama()
    before, expected = weights(model), loss_of(model)
    handle = park_layers(model, **settings)
    with pytest.warns(UserWarning, match="the copy of a model with parked layers has exact weights"):
        copied = copy.deepcopy(model)
    assert differing(weights(copied), before) == []
    assert torch.equal(loss_of(copied), expected)
    assert not copied._ddp_params_and_buffers_to_ignore
    with pytest.raises(TypeError, match="the handle can't be copied"):
        copy.deepcopy(handle)


def test_a_handle_may_be_dropped_and_a_model_that_is_gone_is_freed() -> None:
    model = lora_llama()
    expected = loss_of(model)
    park_layers(model)
    gc.collect()
    assert torch.equal(loss_of(model), expected)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_after_a_broken_pass_training_goes_on(moment: str, error: type[BaseException]) -> None:
    model = lora_llama()
    dense = copy.deepcopy(model)
    park_layers(model)
    break_off(model, moment, error)
    own, plain = optimizer_of(model, "lora"), optimizer_of(dense, "lora")
    assert same(trained(model, own, 4), trained(dense, plain, 4))


def test_a_block_or_a_part_may_be_called_by_itself() -> None:
    model: Any = tiny_llama(torch.bfloat16, blocks=4).requires_grad_(False)
    dense = copy.deepcopy(model)
    park_layers(model)
    ids = BATCHES[0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(model.model(ids).last_hidden_state, dense.model(ids).last_hidden_state)
        hidden = model.model.embed_tokens(ids)
        places = torch.arange(ids.shape[1])[None]
        rope = model.model.rotary_emb(hidden, places)
        for index in (2, 0):
            both = [each.model.layers[index](hidden, position_embeddings=rope) for each in (model, dense)]
            assert torch.equal(*both)
    prompt = ids[:, :4]
    own, expected = (each.eval().generate(prompt, max_new_tokens=4, do_sample=False) for each in (model, dense))
    assert torch.equal(own, expected)


def test_auto_lets_blocks_stay_that_have_room_after_two_training_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora_llama()
    dense = copy.deepcopy(model)
    room = 30_000
    monkeypatch.setattr(streamed_model.PeakMemory, "unused_bytes", lambda *_: room)
    handle = park_layers(model)
    streamed: Any = handle._blocks.streamed
    own, plain = optimizer_of(model, "lora"), optimizer_of(dense, "lora")
    sizes = streamed.blocks.weights.block_bytes
    seen = []
    for step in range(5):
        assert same(trained(model, own, 1, step), trained(dense, plain, 1, step))
        seen.append(len(sizes) - len(streamed.blocks.weights.streamed))
    assert seen[0] == 0 and seen[-1] == room // sizes[0] > 0


class Wrapper(nn.Module):
    """A program's own module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
@pytest.mark.parametrize("kind", ["AdaLora", "IA3", "LoHa", "LoKr", "OFT", "BOFT", "Vera", "RandLora", "LNTuning"])
@pytest.mark.parametrize("storage", [("exact", "host"), ("int8", "device")], ids=str)
def test_other_adapters_of_peft_have_the_same_bits(kind: str, storage: Any) -> None:
    settings: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    settings |= {"AdaLora": {"total_step": 20}, "IA3": {"feedforward_modules": ["down_proj"]}}.get(kind, {})
    settings |= {"BOFT": {"boft_block_size": 4}, "OFT": {"oft_block_size": 4}}.get(kind, {})
    settings = {"target_modules": ["norm", "input_layernorm"]} if kind == "LNTuning" else settings
    config = getattr(peft, f"{kind}Config")(**settings)
    torch.manual_seed(0)
    model = Wrapper(get_peft_model(tiny_llama(blocks=3), config))
    dense = by_hand(model, storage[0])
    park_layers(model, form=storage[0], place=storage[1])
    assert same(trained(model, optimizer_of(model, "lora"), 3), trained(dense, optimizer_of(dense, "lora"), 3))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
def test_adapters_that_read_weights_are_found_inside_of_a_wrapper() -> None:
    with pytest.raises(ValueError, match="'default' uses DoRA"):
        park_layers(Wrapper(lora_llama(use_dora=True)))
    config = peft.HRAConfig(target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"'default' is of the type HRA, which may read.*Use one of"):
        park_layers(get_peft_model(tiny_llama(), config))
    model = Wrapper(lora_llama())
    park_layers(model, form="int8", place="device")
    loss_of(model)
    inner: Any = model.inner
    inner.add_adapter("other", LoraConfig(r=2, target_modules=["up_proj"]))
    loss_of(model)
    with pytest.raises(RuntimeError, match="can't be merged into parked weights"):
        inner.base_model.model.model.layers[0].mlp.up_proj.merge()
    inner.add_adapter("dora", LoraConfig(r=2, target_modules=["up_proj"], use_dora=True))
    with pytest.raises(ValueError, match="'dora' uses DoRA"):
        loss_of(model)


def test_a_merged_adapter_is_not_parked() -> None:
    model = lora_llama()
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"has merged its adapter.*unmerge_adapter"):
        park_layers(model)
    model.unmerge_adapter()
    park_layers(model).remove()


@pytest.mark.parametrize("settings", [{}, {"form": "int8", "place": "device"}], ids=str)
def test_a_second_thread_is_refused_while_the_first_runs(settings: Any) -> None:
    model = lora_llama()
    expected = loss_of(model)
    handle = park_layers(model, **settings)
    expected = loss_of(model)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            loss_of(model)
        except RuntimeError as error:
            errors.append(error)

    def start_another(*ignored: Any) -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    block: Any = model.get_submodule("base_model.model.model.layers.1")
    hook = block.register_forward_hook(start_another)
    assert torch.equal(loss_of(model), expected)
    hook.remove()
    (error,) = errors
    assert "a second thread runs the model" in str(error)
    run()  # in turn
    assert len(errors) == 1 and torch.equal(loss_of(model), expected)
    handle.remove()


@pytest.mark.parametrize("entry", ["model", "base model"])
def test_after_ctrl_c_any_part_of_the_model_begins_anew(entry: str) -> None:
    model = lora_llama()
    dense = copy.deepcopy(model)
    park_layers(model)
    called, plain = (each if entry == "model" else each.get_base_model() for each in (model, dense))
    for _ in range(3):
        break_off(model, "forward")
    seen: list[torch.Tensor] = []
    for each in (model, dense):
        with torch.no_grad():
            each.get_base_model().get_parameter("model.layers.0.self_attn.q_proj.base_layer.weight").mul_(2)
    with saved_tensors_hooks(lambda saved: seen.append(saved) or saved, lambda saved: saved):
        loss = called(**BATCHES[0]).loss
        num_seen = len(seen)
        called(**BATCHES[0])
        assert len(seen) == 2 * num_seen > 0  # whoever began a context since keeps it
    assert torch.equal(loss.detach(), loss_of(plain))
    assert saved_tensors_hooks_now() is None
    model.get_base_model().get_parameter("model.layers.0.self_attn.q_proj.base_layer.weight").requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires a gradient now"):
        loss_of(called)


@pytest.mark.parametrize("settings", [{}, {"form": "int8", "place": "device"}], ids=str)
def test_ctrl_c_skips_no_check_of_the_next_forward_and_the_end_leaves_no_hooks(settings: Any) -> None:
    model = lora_llama()
    handle = park_layers(model, **settings)
    break_off(model, "forward")
    replace_weight(model)
    with pytest.raises(RuntimeError, match="was replaced by another parameter"):
        loss_of(model)
    break_off(lora_llama(), "forward")
    handle.remove()
    assert saved_tensors_hooks_now() is None


STORAGE = FACTORS["storage"]


@pytest.mark.parametrize("storage", STORAGE, ids=str)
def test_a_saved_tensor_that_was_written_is_an_error_as_without_parking(storage: Any) -> None:
    model = lora_llama(torch.float32)
    park_layers(model, form=storage[0], place=storage[1])
    optimizer = optimizer_of(model, "lora")
    first, second = (model(**batch).loss for batch in BATCHES[:2])
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an (inplace|in-place) operation"):
        second.backward()


@pytest.mark.parametrize("storage", STORAGE, ids=str)
def test_a_forward_without_a_backward_keeps_no_tensor(storage: Any) -> None:
    model = lora_llama(torch.float32)
    park_layers(model, form=storage[0], place=storage[1])

    def num_alive() -> int:
        model(**BATCHES[0])
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    assert len({num_alive() for _ in range(3)}) == 1


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_entries_of_quantised_weights_refuse_to_be_written(form: Any) -> None:
    model = tiny_llama(blocks=2).requires_grad_(False)
    before = weights(model)
    park_layers(model, form=form, place="device")
    name = "model.layers.1.mlp.up_proj.weight"
    entry = model.state_dict()[name]
    plain = torch.zeros_like(entry)
    writes: list[Callable[[], Any]] = [
        lambda: entry.copy_(plain),
        lambda: entry.detach().copy_(plain),
        lambda: entry.data.zero_(),
        lambda: setattr(entry, "data", plain),
        lambda: entry.__setitem__(0, 1.0),
        lambda: entry.__iadd__(1),
        lambda: torch.add(plain, plain, out=entry),
        lambda: torch._foreach_copy_([entry], [plain]),
        lambda: nn.init.normal_(entry),
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match=r"would write to the entry of a quantised weight.*load_state_dict"):
            write()
    plain.copy_(entry)
    assert torch.equal(plain, before[name]) and torch.equal(entry.clone(), before[name])


class ReadsItsWeight(nn.Module):
    """A part that multiplies by the weight of a layer without its forward."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.layer.weight.T.to(self.layer.weight.dtype)


@pytest.mark.parametrize("trains", [False, True])
def test_a_weight_that_is_read_past_its_layer_stays_exact(trains: bool) -> None:
    model: Any = tiny_llama(torch.bfloat16, blocks=3)
    for layer in model.model.layers:
        layer.mlp.up_proj = ReadsItsWeight(layer.mlp.up_proj)
        layer.self_attn.short = nn.Conv1d(4, 4, 3)
    dense = copy.deepcopy(model).requires_grad_(False)
    hand = by_hand(dense, "int8")
    for own, exact in zip(hand.model.layers, dense.model.layers, strict=True):  # type: ignore[union-attr, arg-type]
        own.mlp.up_proj.load_state_dict(exact.mlp.up_proj.state_dict())  # type: ignore[union-attr]

    def park() -> Any:
        if trains:
            return HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(waiting="int8"), lr=1e-3)
        return park_layers(model.requires_grad_(False), form="int8")

    with pytest.warns(UserWarning, match=r"layers\.0\.mlp\.up_proj\.layer\.weight and 2 more are read past") as said:
        handle = park()
    assert len(said) == 1 and handle is not None
    if not trains:
        assert torch.equal(loss_of(model), loss_of(hand))


@pytest.mark.parametrize("settings", [{}, {"form": "int8"}], ids=str)
def test_a_copy_of_parked_layers_can_be_parked(settings: Any) -> None:
    model = lora_llama()
    park_layers(model, **settings)
    expected = loss_of(model)
    with pytest.warns(UserWarning, match="has exact weights of its own"):
        copied = copy.deepcopy(model)
    park_layers(copied, **settings)
    assert torch.equal(loss_of(copied), expected)


def gradients_of(model: Any) -> list[torch.Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("settings", [{}, {"form": "int8"}], ids=str)
def test_a_backward_after_a_write_is_an_error(settings: Any) -> None:
    model = lora_llama()
    park_layers(model, **settings)
    name = "base_model.model.model.layers.2.mlp.up_proj.base_layer.weight"
    for write in (assign, load):
        loss = model(**BATCHES[0]).loss
        write(model, name, torch.randn(model.get_parameter(name).shape, dtype=torch.bfloat16))
        loss_of(model)
        with pytest.raises(RuntimeError, match=r"Run the backward before"):
            loss.backward()
        model.zero_grad()


def test_a_backward_after_the_end_has_the_gradients_of_before_and_changes_no_weight() -> None:
    model = lora_llama()
    dense = copy.deepcopy(model)
    handle = park_layers(model)
    losses = [each(**BATCHES[0]).loss for each in (model, dense)]
    handle.remove()
    for loss in losses:
        loss.backward()
    assert same(gradients_of(model), gradients_of(dense))
    assert not differing(weights(model), weights(dense))
    handle = park_layers(model)
    loss = model(**BATCHES[0]).loss
    handle.remove()
    weight = model.get_parameter("base_model.model.model.layers.2.mlp.up_proj.base_layer.weight")
    with torch.no_grad():
        weight.fill_(3)
    with pytest.raises(RuntimeError, match="Run the backward before"):
        loss.backward()
    assert (weight == 3).all()
    codes = park_layers(model, form="int8")
    loss = model(**BATCHES[0]).loss
    codes.remove()
    with pytest.raises(RuntimeError, match=r"was restored since this forward. Run the backward before"):
        loss.backward()


@pytest.mark.parametrize("settings", [{}, {"form": "int8"}, {"form": "int8", "place": "device"}], ids=str)
def test_a_gradient_of_a_gradient_is_that_of_dense_weights(settings: Any) -> None:
    base: Any = tiny_llama(blocks=3)
    base.set_attn_implementation("eager")  # the fused one has no second derivative
    model = with_lora(base)
    dense = by_hand(model, settings.get("form", "exact"))
    park_layers(model, **settings)
    found = []
    for each in (model, dense):
        trains = [parameter for parameter in each.parameters() if parameter.requires_grad]
        first = torch.autograd.grad(each(**BATCHES[0]).loss, trains, create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()  # type: ignore[union-attr]
        found.append(gradients_of(each))
    assert same(*found)


@pytest.mark.parametrize("settings", [{}, {"form": "int8"}], ids=str)
def test_blocks_may_become_resident_between_a_forward_and_its_backward(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lora_llama()
    dense = by_hand(model, settings.get("form", "exact"))
    monkeypatch.setattr(streamed_model.PeakMemory, "unused_bytes", lambda *_: 30_000)
    handle = park_layers(model, **settings)
    for each in (model, dense):
        for _ in range(2):
            each(**BATCHES[0]).loss.backward()
        sum(each(**BATCHES[index]).loss for index in range(3)).backward()  # type: ignore[union-attr]
    assert same(gradients_of(model), gradients_of(dense))
    streamed: Any = handle._blocks.streamed
    assert len(streamed.blocks.weights.streamed) < len(streamed.blocks.weights.block_bytes)

    def fail(*ignored: Any) -> None:
        raise torch.OutOfMemoryError

    hook = model.get_submodule("base_model.model.model.layers.1").register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(**BATCHES[0])
    hook.remove()
    assert len(streamed.blocks.weights.streamed) == len(streamed.blocks.weights.block_bytes)
    assert torch.equal(loss_of(model), loss_of(dense))


@pytest.mark.parametrize("settings", [{"form": "int8", "place": "device"}, {"form": "nf4"}], ids=str)
def test_a_lack_of_host_memory_leaves_the_model_as_it_was(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora_llama()
    before, marks = weights(model), marks_of(model)
    left = iter(range(5))
    make = exact_source.claimed_host_memory

    def allocate(*arguments: Any) -> torch.Tensor:
        if next(left, None) is None:
            raise MemoryError("no more")
        return make(*arguments)

    monkeypatch.setattr(exact_source, "claimed_host_memory", allocate)
    with pytest.raises(MemoryError, match="no more"):
        park_layers(model, **settings)
    monkeypatch.undo()
    assert differing(weights(model), before) == [] and marks_of(model) == marks
    park_layers(model, **settings).remove()
    assert differing(weights(model), before) == []
