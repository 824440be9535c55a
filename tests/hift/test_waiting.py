"""Waiting layers in fewer bits, against a dense model whose waiting weights are quantised by hand, to the bit."""

import copy
import gc
import itertools
import pickle
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import slivertune
from slivertune import HiFT, HiFTConfig
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.ledger import Ledger
from slivertune.parked.exact_tensor import ExactTensor
from tests.helpers.accelerator import one_device
from tests.helpers.models import (
    Batch,
    bits,
    differing,
    odd_model,
    seeded,
    tiny_gpt2,
    tiny_llama,
    tiny_mixtral,
    token_batches,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.ranks import quick
from tests.helpers.reference import NaiveHiFT, naive_groups, quantized_by_hand, train
from tests.hift.cases import OPTIMIZERS

FORMS = pytest.mark.parametrize("form", ["int8", "nf4"])


class NaiveWaiting(NaiveHiFT):
    """The reference, whose model shows quantised weights, and frozen ones, but in their turn."""

    def __init__(self, model: nn.Module, optimizer_class: Any, *, form: str, **options: Any) -> None:
        super().__init__(model, optimizer_class, **options)
        self.form = form
        self.exact = {name: each.detach().clone() for name, each in self.parameters.items()}
        self.shown: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.show()

    @torch.no_grad()
    def show(self) -> None:
        for name, parameter in self.parameters.items():
            is_linear = parameter.ndim == 2 and (".layers." in name or ".h." in name)
            waits = is_linear and name not in self.active
            exact = self.exact[name]
            if waits and (name not in self.shown or self.shown[name][0] is not exact):
                self.shown[name] = exact, quantized_by_hand(exact, self.form)
            parameter.copy_(self.shown[name][1] if waits else exact)
            # torch multiplies what is not contiguous, as a tile of several sequences, by a weight that trains in one
            # product, by a frozen one in a product a sequence: where kernels round by shape, these differ.
            parameter.requires_grad_(name in self.active)

    def step(self, gradients: Any = None) -> None:
        active = self.active
        super().step(gradients)
        self.exact |= {name: self.parameters[name].detach().clone() for name in active}
        self.show()


def pair(
    model: nn.Module, name: str = "AdamW", *, layers_per_group: int = 1, form: str = "int8", **config: Any
) -> tuple[nn.Module, HiFT, NaiveWaiting]:
    """A model under HiFT, and the reference over its twin."""
    return pair_over(model, twin(model), name, layers_per_group=layers_per_group, form=form, **config)


def pair_over(
    model: nn.Module, dense: nn.Module, name: str, *, layers_per_group: int = 1, form: str = "int8", **config: Any
) -> tuple[nn.Module, HiFT, NaiveWaiting]:
    """The same over a twin that was made before."""
    optimizer_class, options = OPTIMIZERS[name]
    naive = NaiveWaiting(
        dense,
        optimizer_class,
        form=form,
        groups=naive_groups(dense, layers_per_group),
        steps_per_group=config.get("steps_per_group", 1),
        master=config.get("master", "fp32"),
        **options,
    )
    settings: Any = {"layers_per_group": layers_per_group, "waiting": form, **config}
    hift = HiFT(model, optimizer_class, config=HiFTConfig.paper(**settings), **options)
    naive.model = dense  # type: ignore[attr-defined]
    return model, hift, naive


def assert_exact(model: nn.Module, naive: NaiveWaiting) -> None:
    """The state dict holds the exact weights, to the bit."""
    shown = model.state_dict()
    for name, expected in naive.exact.items():
        assert torch.equal(bits(shown[name] + 0), bits(expected + 0)), name


def compare(pair_: Any, batches: list[Batch], steps: int, **options: Any) -> None:
    model, hift, naive = pair_
    for step in range(steps):
        own = train(model, hift, batches, 1, start=step, **options)
        expected = train(naive.model, naive, batches, 1, start=step, **options)
        assert own == expected, f"step {step}"
        assert_exact(model, naive)


# Of their pairs each is in test_pairwise.py.
@rotated(form=["int8", "nf4"], dtype=[torch.float32, torch.bfloat16], layers_per_group=[1, 2, 4])
def test_two_cycles_and_a_turn_are_those_of_weights_quantised_quantized_by_hand(
    form: str, dtype: torch.dtype, layers_per_group: int
) -> None:
    both = pair(tiny_llama(dtype), layers_per_group=layers_per_group, form=form, stream_bytes=4096)
    compare(both, token_batches(8), 2 * both[1].num_groups + 1)


SETTINGS: list[tuple[str, dict[str, Any]]] = [("transformers Adafactor", {})]
"""Those that test_pairwise.py does not have."""


@FORMS
@pytest.mark.parametrize(("name", "config"), SETTINGS, ids=str)
def test_settings_go_together(form: str, name: str, config: dict[str, Any]) -> None:
    both = pair(tiny_llama(torch.bfloat16), name, layers_per_group=2, form=form, **config)
    compare(both, token_batches(8), both[1].cycle_length + 2, accumulation=1 if "stepped" in str(config) else 2)


@rotated(dtype=[torch.float32, torch.bfloat16], state_ram_bytes=[0, 10**5])
def test_exact_weights_and_state_may_wait_on_disk(dtype: torch.dtype, state_ram_bytes: int, tmp_path: Path) -> None:
    config: dict[str, Any] = {"state": "disk", "state_dir": tmp_path, "state_ram_bytes": state_ram_bytes}
    model, hift, naive = pair(tiny_llama(dtype), form="nf4", **config)
    compare((model, hift, naive), token_batches(8), 7)
    other = tiny_llama(dtype, seed=3).state_dict()
    model.load_state_dict(other)
    shown = model.state_dict()
    assert all(torch.equal(shown[name] + 0, other[name] + 0) for name in other)
    hift.detach()
    assert differing(weights(model), other) == []
    hift.reattach()
    train(model, hift, token_batches(8), 6)
    saved = hift.state_dict()
    resumed, again, _ = pair(tiny_llama(dtype, seed=4), form="nf4", **{**config, "state_dir": tmp_path / "again"})
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(saved)
    assert train(resumed, again, token_batches(8), 6) == train(model, hift, token_batches(8), 6)


# ---- saving, loading, going on


@rotated(form=["int8", "nf4"], dtype=[torch.float32, torch.bfloat16], stop=[1, 3, 5, 8])
def test_a_run_goes_on_with_the_same_bits(form: str, dtype: torch.dtype, stop: int, tmp_path: Path) -> None:
    batches = token_batches(8)
    model, hift, naive = pair(tiny_llama(dtype), form=form, stream_bytes=4096)
    train(model, hift, batches, stop)
    torch.save({"model": model.state_dict(), "optimizer": hift.state_dict()}, tmp_path / "state.pt")
    train(naive.model, naive, batches, stop)
    model, hift, _ = pair(tiny_llama(dtype, seed=5), form=form, stream_bytes=8192)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    hift.load_state_dict(saved["optimizer"])
    assert_exact(model, naive)
    own = train(model, hift, batches, 7, start=stop)
    assert own == train(naive.model, naive, batches, 7, start=stop)
    assert_exact(model, naive)


def test_a_turn_that_ends_before_a_forward_leaves_its_weights_waiting() -> None:
    batches = token_batches(8)
    model, hift, naive = pair(tiny_llama(torch.bfloat16), layers_per_group=2)
    train(model, hift, batches, 1)
    train(naive.model, naive, batches, 1)
    # Its first group has linear weights, which are on their way when another's turn is loaded.
    model, other, _ = pair(tiny_llama(torch.bfloat16), layers_per_group=2)
    other.load_state_dict(hift.state_dict())
    assert train(model, other, batches, 4, start=1) == train(naive.model, naive, batches, 4, start=1)
    assert_exact(model, naive)


@pytest.mark.parametrize("steps", [0, 2])
def test_weights_that_are_loaded_count(steps: int) -> None:
    model, hift, _ = pair(tiny_llama(torch.bfloat16))
    other = tiny_llama(torch.bfloat16, seed=7).state_dict()
    train(model, hift, token_batches(8), steps)
    model.load_state_dict(other)
    shown = model.state_dict()
    assert all(torch.equal(shown[name] + 0, other[name] + 0) for name in other)
    # A second loading by parts, and one that does not fit.
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3)}, strict=False)
    with torch.no_grad():
        loss = model(**token_batches(1)[0]).loss
    dense = twin(tiny_llama(torch.bfloat16, seed=7))
    for name, parameter in dense.named_parameters():
        if parameter.ndim == 2 and ".layers." in name and f"layers.{hift.active_group - 1}." not in name:
            parameter.data = quantized_by_hand(parameter.data, "int8")
    with torch.no_grad():
        assert torch.equal(loss, dense(**token_batches(1)[0]).loss)


def test_a_saved_model_is_exact_and_one_shard_of_it_is_in_memory_at_a_time(tmp_path: Path) -> None:
    model, hift, naive = pair(tiny_llama(torch.bfloat16, blocks=9))
    train(model, hift, token_batches(8), 4)
    train(naive.model, naive, token_batches(8), 4)
    sizes: list[int] = []
    values = ExactTensor.values
    alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def counted(self: ExactTensor) -> torch.Tensor:
        made = values(self)
        alive.add(made.untyped_storage())
        sizes.append(sum(each.nbytes() for each in alive))
        return made

    shard = 25_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExactTensor, "values", counted)
        model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert 0 < max(sizes) <= shard
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(bits(loaded[name]), bits(each)) for name, each in naive.exact.items())


def test_other_programs_save_exact_weights(tmp_path: Path) -> None:
    model, hift, naive = pair(tiny_llama(torch.bfloat16))
    train(model, hift, token_batches(8), 4)
    train(naive.model, naive, token_batches(8), 4)
    save_model(model, str(tmp_path / "model.safetensors"))
    with one_device() as accelerator:
        accelerator.save_model(model, str(tmp_path / "accelerate"))
    for loaded in (
        load_file(tmp_path / "model.safetensors"),
        load_file(tmp_path / "accelerate" / "model.safetensors"),
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(model).state_dict(),
    ):
        assert all(torch.equal(bits(loaded[name] + 0), bits(each)) for name, each in naive.exact.items())
    with pytest.raises(TypeError, match=r"can't be pickled .*state_dict"):
        pickle.dumps(model)


# ---- ends, and what else happens to a model


def test_after_detach_the_model_is_as_any_other_and_reattach_goes_on() -> None:
    model, hift, naive = pair(tiny_llama(torch.bfloat16))
    batches = token_batches(8)
    before = {name: set(vars(module)) for name, module in tiny_llama().named_modules()}
    train(model, hift, batches, 3)
    train(naive.model, naive, batches, 3)
    hift.detach()
    assert all(torch.equal(bits(each.detach()), bits(naive.exact[name])) for name, each in model.named_parameters())
    assert all(each.requires_grad for each in model.parameters())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    hift.reattach()
    assert train(model, hift, batches, 7, start=3) == train(naive.model, naive, batches, 7, start=3)
    assert_exact(model, naive)


def test_an_optimizer_that_is_dropped_leaves_exact_weights() -> None:
    model, hift, naive = pair(tiny_llama(torch.bfloat16))
    train(model, hift, token_batches(8), 3)
    train(naive.model, naive, token_batches(8), 3)
    del hift
    gc.collect()
    assert all(torch.equal(bits(each.detach()), bits(naive.exact[name])) for name, each in model.named_parameters())


def test_what_has_no_room_on_the_device_goes_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slivertune.parked.quantized_layers.free_bytes", lambda device: 1000)
    model, hift, naive = pair(tiny_llama(torch.bfloat16))
    batches = token_batches(8)
    train(model, hift, batches, 3)
    train(naive.model, naive, batches, 3)
    with pytest.warns(UserWarning, match=r"bytes of exact weights do not fit on cpu, which has 1,000 bytes free"):
        hift.detach()
    assert_exact(model, naive)
    with torch.no_grad():
        assert torch.equal(model(**batches[0]).loss, naive.model(**batches[0]).loss)  # type: ignore[attr-defined]
    hift.reattach()
    assert train(model, hift, batches, 7, start=3) == train(naive.model, naive, batches, 7, start=3)
    assert_exact(model, naive)


def test_a_waiting_weight_that_is_read_or_written_otherwise_is_seen_at_once() -> None:
    model, _hift, _ = pair(tiny_llama(torch.bfloat16))
    weight = model.get_submodule("model.layers.1.mlp.up_proj").weight
    assert weight.shape == (48, 32) and weight.dtype == torch.bfloat16 and weight.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        weight.mul_(2)


def test_forwards_without_gradients_and_generate_run_on_what_lies_on_the_device() -> None:
    model, hift, naive = pair(tiny_llama(torch.bfloat16))
    train(model, hift, token_batches(8), 2)
    train(naive.model, naive, token_batches(8), 2)
    ids = token_batches(1)[0]["input_ids"]
    for each in (model, naive.model):
        each.eval()
    assert torch.equal(
        model.generate(ids, max_new_tokens=5, do_sample=False),
        naive.model.generate(ids, max_new_tokens=5, do_sample=False),
    )
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, naive.model(ids).logits)


def test_a_model_that_moves_takes_its_codes_along() -> None:
    model, hift, naive = pair(tiny_llama(torch.bfloat16))
    model.to("cpu")
    compare((model, hift, naive), token_batches(8), 3)
    with pytest.raises(RuntimeError, match=r"was torch.bfloat16 when HiFT was built and is torch.float32 now"):
        model.float()(**token_batches(1)[0])


# ---- together with the rest of the library


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_give_the_same_bits(reentrant: bool) -> None:
    both = pair(tiny_llama(torch.bfloat16))
    for each in (both[0], both[2].model):
        enable_checkpointing(each, {"use_reentrant": reentrant})
        each.enable_input_require_grads()
    compare(both, token_batches(8), 7)


def test_autocast_computes_as_over_dense_weights() -> None:
    model, hift, naive = pair(tiny_llama())
    batches = token_batches(8)
    for step in range(7):
        losses = []
        for each, optimizer in ((model, hift), (naive.model, naive)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(**batches[step % 8]).loss
            loss.backward()
            if optimizer is naive:
                naive.keep_active_gradients()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        assert_exact(model, naive)


def test_tokentune_goes_on_top() -> None:
    model, hift, naive = pair(tiny_llama(torch.bfloat16))
    batches = token_batches(8)
    with (
        slivertune.TokenTune(ratio=0.5, seed=3).attach(model),
        slivertune.TokenTune(ratio=0.5, seed=3).attach(naive.model),
    ):
        compare((model, hift, naive), batches, 7)


def test_a_conv1d_waits_as_a_linear_layer_does() -> None:
    compare(pair(tiny_gpt2(torch.bfloat16)), token_batches(8), 7)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
def test_the_base_of_adapters_waits_for_good() -> None:
    model = get_peft_model(tiny_llama(torch.bfloat16), LoraConfig(r=4, target_modules="all-linear"))
    dense = copy.deepcopy(model)
    for name, parameter in dense.named_parameters():
        if "base_layer" in name and "layers." in name:
            parameter.data = quantized_by_hand(parameter.data, "nf4")
    options: dict[str, Any] = {"lr": 1e-2}
    with pytest.warns(UserWarning, match="HiFT keeps them frozen"):
        own = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(waiting="nf4"), **options)
    with pytest.warns(UserWarning, match="HiFT keeps them frozen"):
        plain = HiFT(dense, torch.optim.AdamW, config=HiFTConfig.paper(), **options)
    assert train(model, own, token_batches(8), 9) == train(dense, plain, token_batches(8), 9)
    trained = {name for name, each in model.named_parameters() if "lora" in name}
    assert (
        differing(
            {n: e for n, e in weights(model).items() if n in trained},
            {n: e for n, e in weights(dense).items() if n in trained},
        )
        == []
    )
    saved = get_peft_model_state_dict(model)
    assert saved.keys() == get_peft_model_state_dict(dense).keys()


# ---- bytes


# test_streamed_codes.py counts nf4, and two layers in a group.
@pytest.mark.parametrize(("form", "layers_per_group"), quick(itertools.product(["int8", "nf4"], [1, 2]), [("int8", 1)]))
def test_the_device_holds_codes_the_rest_and_the_active_group(form: str, layers_per_group: int) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model = seeded(lambda: LlamaForCausalLM(config), 0).to(torch.bfloat16)
    sizes = {name: each.nbytes for name, each in model.named_parameters()}
    linear = {name for name, each in model.named_parameters() if each.ndim == 2 and ".layers." in name}
    piece, prefetch = 2**18, 2**18
    settings: Any = {
        "waiting": form,
        "layers_per_group": layers_per_group,
        "stream_bytes": piece,
        "prefetch_bytes": prefetch,
    }
    gc.collect()  # an optimizer that is dropped gives its model the exact weights back
    with Ledger(model) as ledger:
        hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(**settings), lr=1e-3)
        batches = token_batches(2, vocab=64)
        train(model, hift, batches, hift.num_groups)
        held = [hift.turns.parked.quantized_weight(each) for name, each in model.named_parameters() if name in linear]
        codes = sum(each.nbytes for one in held if one is not None and one.is_quantized for each in one.tensors())
        gc.collect()
        ledger.reset_peak()
        train(model, hift, batches, hift.num_groups + 1, start=hift.num_groups)
    exact_rest = sum(size for name, size in sizes.items() if name not in linear)
    block = sum(size for name, size in sizes.items() if ".layers.0." in name)
    largest = max(sizes[name] for name in linear)
    bits_of = {"int8": 8.25, "nf4": 4.127}[form]
    tables = 4 * (16 + 256 + 1) if form == "nf4" else 0
    all_codes = sum(sizes[name] / 16 * bits_of + tables for name in linear)
    assert codes <= all_codes
    bound = all_codes + exact_rest + layers_per_group * block
    # A group's exact weights are made while its codes are still there, and the other way round.
    assert ledger.highest.parameters <= bound + largest
    assert ledger.highest.parameters < 0.8 * sum(sizes.values())
    assert ledger.highest.state <= 2 * piece + prefetch


# ---- bad input


def tied(model: nn.Module) -> None:
    model.get_submodule("model.layers.1.mlp").up_proj.weight = model.get_submodule("model.layers.0.mlp").up_proj.weight


@pytest.mark.parametrize(
    ("build", "config", "message"),
    [
        (tiny_llama, {"waiting": "int4"}, "waiting='int4' must be one of"),
        (tiny_llama, {"waiting": "int8", "state": "device"}, r'state="device" offloads none\. Use state="host"'),
        (tiny_llama, {"waiting": "int8", "state": "discard"}, 'Use state="host" or "disk"'),
        (
            tiny_mixtral,
            {"waiting": "int8"},
            r"mlp\.experts.* stacks of experts \([0-9,]+ bytes\).*Leave the weights exact",
        ),
        (lambda: tiny_llama().half(), {"waiting": "int8"}, "float16"),
    ],
)
def test_what_can_not_wait_is_refused(build: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HiFT(build(), torch.optim.AdamW, config=HiFTConfig.paper(**config), lr=1e-3)


def test_tied_wrapped_and_missing_linear_layers_are_refused_and_the_model_stays_as_it_was() -> None:
    config = HiFTConfig.paper(waiting="int8")
    model = tiny_llama()
    tied(model)
    with pytest.raises(ValueError, match=r"layers\.\d\.mlp\.up_proj\.weight is tied to .*Untie them"):
        HiFT(model, torch.optim.AdamW, config=config, lr=1e-3)
    model = tiny_llama()
    handle = slivertune.TokenTune(ratio=0.5).attach(model)
    with pytest.raises(ValueError, match="Quantise the layers first"):
        HiFT(model, torch.optim.AdamW, config=config, lr=1e-3)
    handle.remove()
    assert all(each.requires_grad for each in model.parameters())
    HiFT(model, torch.optim.AdamW, config=config, lr=1e-3).detach()
    model = odd_model()
    if not any(type(module) is nn.Linear for module in model.modules()):
        with pytest.raises(ValueError, match=r"no torch\.nn\.Linear in its blocks"):
            HiFT(model, torch.optim.AdamW, config=config, lr=1e-3)


def test_a_checkpoint_of_another_form_is_refused_and_nothing_is_changed() -> None:
    model, hift, naive = pair(tiny_llama(torch.bfloat16))
    train(model, hift, token_batches(8), 2)
    train(naive.model, naive, token_batches(8), 2)
    other, theirs, _ = pair(tiny_llama(torch.bfloat16), form="nf4")
    train(other, theirs, token_batches(8), 3)
    with pytest.raises(ValueError, match=r"another form of quantised layers .*'nf4' there, 'int8' here"):
        hift.load_state_dict(theirs.state_dict())
    assert_exact(model, naive)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match=r"needs bitsandbytes, which is missing\. Run pip install bitsandbytes"):
        HiFT(tiny_llama(), torch.optim.AdamW, config=HiFTConfig.paper(waiting="nf4"), lr=1e-3)


# ---- models whose exact weights the device has no room for


def test_layers_that_were_quantized_before_are_taken_over() -> None:
    plain = tiny_llama(torch.bfloat16)
    dense = twin(plain)
    handle = slivertune.park_for_hift(plain, HiFTConfig(waiting="nf4"))
    with pytest.raises(ValueError, match=r"is quantised as nf4 already, and 'int8' was asked for"):
        HiFT(plain, torch.optim.AdamW, config=HiFTConfig.paper(waiting="int8"), lr=1e-2)
    model, hift, naive = pair_over(plain, dense, "AdamW", form="nf4")
    compare((model, hift, naive), token_batches(8), 7)
    hift.detach()
    handle.remove()
    assert all(torch.equal(bits(each.detach()), bits(naive.exact[name])) for name, each in model.named_parameters())


def test_a_handle_gives_the_exact_weights_back() -> None:
    model = tiny_llama(torch.bfloat16)
    before = weights(model)
    with pytest.raises(ValueError, match=r"leave all weights as they are.*or leave out park_for_hift"):
        slivertune.park_for_hift(model, HiFTConfig())
    handle = slivertune.park_for_hift(model, HiFTConfig(waiting="int8"))
    with pytest.raises(TypeError, match="belongs to one model"):
        copy.copy(handle)
    assert differing(weights(model), before) != []
    handle.remove()
    assert differing(weights(model), before) == []
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_fits_in_no_other_way_is_loaded_trained_and_saved(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=10, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    dense = seeded(lambda: LlamaForCausalLM(config), 0).to(torch.bfloat16)
    dense.save_pretrained(tmp_path / "base", max_shard_size=150_000)
    exact_bytes = sum(each.nbytes for each in dense.parameters())
    batches = token_batches(4, vocab=64, batch_size=1)
    gc.collect()
    with Ledger() as ledger:
        model = slivertune.load_quantized(AutoModelForCausalLM, tmp_path / "base", "int8").train()
        hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(waiting="int8", stream_bytes=2**17), lr=1e-3)
        train(model, hift, batches, hift.num_groups + 2)
        model.save_pretrained(tmp_path / "tuned", max_shard_size=150_000)
    assert ledger.highest.device < exact_bytes, "activations, gradients and state included"
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.bfloat16)
    dense = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).train()
    naive = NaiveWaiting(dense, torch.optim.AdamW, form="int8", groups=naive_groups(dense, 1), lr=1e-3)
    train(dense, naive, batches, hift.num_groups + 2)
    assert all(torch.equal(bits(each.detach()), bits(naive.exact[name])) for name, each in loaded.named_parameters())


def test_what_can_not_be_loaded_piece_by_piece_is_refused(tmp_path: Path) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor .*save_pretrained"):
        slivertune.load_quantized(AutoModelForCausalLM, tmp_path, "int8")
    save_file({"model.strange.weight": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"unknown: \['model\.strange\.weight'\].*park_for_hift"):
        slivertune.load_quantized(AutoModelForCausalLM, tmp_path, "int8")


def test_long_sequences_go_by_tiles_and_offloaded_inputs() -> None:
    model, hift, naive = pair(tiny_llama(torch.bfloat16))
    for each in (model, naive.model):
        enable_checkpointing(each)
    with (
        slivertune.tile_tokens(model, 5),
        slivertune.offload_activations(model),
        slivertune.tile_tokens(naive.model, 5),
    ):
        compare((model, hift, naive), token_batches(8), 7)
