"""Waiting layers whose codes wait on the host: the bits of weights quantised by hand, and the device's bytes."""

import copy
import gc
import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import slivertune
from slivertune import HiFT, HiFTConfig
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.ledger import Ledger
from tests.helpers.delayed_streams import delayed
from tests.helpers.models import bits, differing, seeded, tiny_llama, token_batches, twin, weights
from tests.helpers.pairwise import rotated
from tests.helpers.ranks import quick
from tests.helpers.reference import train
from tests.hift.test_waiting import assert_exact, compare, pair, pair_over

BLOCKS = 5
HOST: dict[str, Any] = {"weights": "host", "resident_bytes": 0, "stream_bytes": 20_000}
BATCHES = token_batches(12)


def both(
    dtype: torch.dtype = torch.bfloat16, name: str = "AdamW", *, checkpointing: bool = False, **config: Any
) -> Any:
    """A model under HiFT, and the reference, whose weights are all resident and quantised by hand."""
    made = pair(tiny_llama(dtype, blocks=BLOCKS), name, **{**HOST, **config})
    for model in (made[0], made[2].model) if checkpointing else ():
        enable_checkpointing(model)
    return made


# Of their pairs each is in test_pairwise.py.
@rotated(
    form=["int8", "nf4"],
    dtype=[torch.float32, torch.bfloat16],
    layers_per_group=[1, 4],
    checkpointing=[True, False],
)
def test_two_cycles_and_a_turn_are_those_of_weights_quantised_by_hand(
    form: str, dtype: torch.dtype, layers_per_group: int, checkpointing: bool
) -> None:
    made = both(dtype, form=form, layers_per_group=layers_per_group, checkpointing=checkpointing)
    compare(made, BATCHES, 2 * made[1].num_groups + 1, accumulation=2 if layers_per_group > 1 else 1)


ELSEWHERE: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"resident_bytes": 30_000}),
    ("AdamW", {"master": "none", "layers_per_group": 2}),
    ("AdamW", {"steps_per_group": 2, "prefetch_bytes": 10**6}),
    ("AdamW", {"gradients": "host", "layers_per_group": 3}),
    ("AdamW", {"gradients": "stepped", "checkpointing": True}),
    ("AdamW", {"stream_bytes": 0, "layers_per_group": BLOCKS + 2}),
    ("AdamW8bit", {}),
]
"""Settings that test_pairwise.py has, each with each."""
HERE: list[tuple[str, dict[str, Any]]] = [("SGD momentum", {"resident_bytes": 10**6}), ("transformers Adafactor", {})]


@pytest.mark.parametrize(("name", "config"), quick(HERE + ELSEWHERE, HERE), ids=str)
def test_settings_go_together(name: str, config: dict[str, Any]) -> None:
    made = both(torch.bfloat16, name, form="nf4", **config)
    compare(made, BATCHES, made[1].cycle_length + 2, accumulation=1 if "stepped" in str(config) else 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config", [{"prefetch_bytes": 10**6}, {"master": "none", "layers_per_group": 3}], ids=str)
def test_late_copies_change_no_bit(seed: int | None, checkpointing: bool, config: dict[str, Any]) -> None:
    with delayed(seed) as streams:
        made = both(checkpointing=checkpointing, resident_bytes=15_000, **config)
        compare(made, BATCHES, 2 * made[1].num_groups + 1)
    assert sum(each.num_late for each in streams) > 0


def everything(model: Any) -> ExitStack:
    """Inputs of checkpointed blocks on the host, and tiles of tokens."""
    stack = ExitStack()
    stack.enter_context(slivertune.tile_tokens(model, 9))
    stack.enter_context(slivertune.offload_activations(model))
    return stack


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_together_goes_on_from_the_midst_of_a_cycle_with_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "form": "nf4", "state": "disk", "state_ram_bytes": 10**5, "gradients": "host", "checkpointing": True,
        "layers_per_group": 2, "max_grad_norm": 0.5,
    }  # fmt: skip
    model, hift, naive = both(dtype, state_dir=tmp_path / "first", **config)
    with everything(model), slivertune.tile_tokens(naive.model, 9):
        for step in range(hift.num_groups + 1):
            losses = []
            for each in (model, naive.model):
                for micro in range(2):
                    loss = each(**BATCHES[(2 * step + micro) % 12]).loss / 2
                    loss.backward()
                    losses.append(loss.item())
            naive.keep_active_gradients()
            torch.nn.utils.clip_grad_norm_([p for p in naive.model.parameters() if p.grad is not None], 0.5)
            for optimizer in (hift, naive):
                optimizer.step()
                optimizer.zero_grad()
            assert losses[:2] == losses[2:], f"step {step}"
            assert_exact(model, naive)
    saved = copy.deepcopy((model.state_dict(), hift.state_dict()))
    other, resumed, _ = both(dtype, state_dir=tmp_path / "second", **config)
    with everything(other):
        train(other, resumed, BATCHES, 1)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        own = train(other, resumed, BATCHES, 4)
    with everything(model):
        assert own == train(model, hift, BATCHES, 4)
    shown = model.state_dict()
    assert all(torch.equal(bits(value + 0), bits(shown[name] + 0)) for name, value in other.state_dict().items())


# ---- loading, ends, and what else happens to a model


def test_weights_that_are_loaded_count_and_evaluation_runs_on_codes() -> None:
    model, hift, naive = both()
    with delayed(None):
        compare((model, hift, naive), BATCHES, 4)
        other = tiny_llama(torch.bfloat16, blocks=BLOCKS, seed=7).state_dict()
        model.load_state_dict(other)
        naive.exact = {name: other[name].clone() for name in naive.exact}
        naive.show()
        for each in (model, naive.model):
            each.eval()
        with torch.inference_mode():
            assert torch.equal(model(**BATCHES[0]).logits, naive.model(**BATCHES[0]).logits)
        prompt = BATCHES[0]["input_ids"][:, :4]
        texts = [m.generate(prompt, max_new_tokens=5, do_sample=False) for m in (model, naive.model)]
        assert torch.equal(*texts)
        assert_exact(model, naive)


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_layer_that_is_called_alone_has_the_weight_that_was_loaded_and_its_block_comes(has_failed: bool) -> None:
    model, hift, _ = both()
    train(model, hift, BATCHES, 2)
    own = hift.turns.parked.streamed
    if has_failed:
        handle = model.get_submodule("model.layers.3.mlp.down_proj").register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**BATCHES[0])
        handle.remove()
    hidden = torch.ones(1, 3, 32, dtype=torch.bfloat16)
    names = [f"model.layers.{index}.mlp.up_proj" for index in range(BLOCKS) if index != hift.active_group - 1]
    quarter = torch.full((48, 32), 0.25, dtype=torch.bfloat16)
    model.load_state_dict({f"{name}.weight": quarter for name in names}, strict=False)
    with torch.no_grad():
        for _ in range(2):
            for name in names:
                assert torch.equal(model.get_submodule(name)(hidden), torch.full((1, 3, 48), 8.0).bfloat16())
                assert int(name.split(".")[2]) in own.blocks.weights._brought
            model(**BATCHES[0])


def test_after_detach_exact_weights_lie_on_the_host_and_reattach_goes_on() -> None:
    before = {name: set(vars(module)) for name, module in tiny_llama(blocks=BLOCKS).named_modules()}
    model, hift, naive = both(resident_bytes=15_000)
    train(model, hift, BATCHES, 3)
    train(naive.model, naive, BATCHES, 3)
    gc.collect()
    with Ledger(model) as ledger:
        held = ledger.current().parameters
        hift.detach()
    assert ledger.highest.parameters <= held, "nothing comes to the device"
    assert all(torch.equal(bits(each.detach()), bits(naive.exact[name])) for name, each in model.named_parameters())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    hift.reattach()
    assert train(model, hift, BATCHES, 9, start=3) == train(naive.model, naive, BATCHES, 9, start=3)
    assert_exact(model, naive)
    del hift
    gc.collect()
    assert all(torch.equal(bits(each.detach()), bits(naive.exact[name])) for name, each in model.named_parameters())


def test_a_copy_and_a_saved_model_are_exact(tmp_path: Path) -> None:
    model, hift, naive = both()
    train(model, hift, BATCHES, 4)
    train(naive.model, naive, BATCHES, 4)
    model(**BATCHES[0]).loss.backward()
    copied = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for other in (copied, loaded):
        found = dict(other.named_parameters())
        assert all(torch.equal(bits(found[name].detach()), bits(each)) for name, each in naive.exact.items())


def test_a_backward_after_its_codes_are_gone_is_an_error_that_names_the_weight() -> None:
    model, hift, _ = both()
    train(model, hift, BATCHES, 1)
    loss = model(**BATCHES[0]).loss
    name = "model.layers.3.mlp.up_proj.weight"
    model.load_state_dict({name: model.state_dict()[name]}, strict=False)
    model(**BATCHES[0])
    with pytest.raises(
        RuntimeError, match=r"layers\.\d.*was quantised again since this forward.*Run the backward before"
    ):
        loss.backward()


def test_layers_that_were_quantized_before_are_taken_over() -> None:
    plain = tiny_llama(torch.bfloat16, blocks=BLOCKS)
    dense = twin(plain)
    slivertune.park_for_hift(plain, HiFTConfig(waiting="nf4"))
    compare(pair_over(plain, dense, "AdamW", form="nf4", **HOST), BATCHES, 9)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
def test_the_base_of_adapters_is_streamed_for_good() -> None:
    model = get_peft_model(tiny_llama(torch.bfloat16, blocks=BLOCKS), LoraConfig(r=4, target_modules="all-linear"))
    other = copy.deepcopy(model)
    losses = []
    for each, place in ((model, HOST), (other, {"stream_bytes": 20_000})):
        with pytest.warns(UserWarning, match="HiFT keeps them frozen"):
            hift = HiFT(each, torch.optim.AdamW, config=HiFTConfig.paper(waiting="nf4", **place), lr=1e-2)
        losses.append(train(each, hift, BATCHES, hift.num_groups + 2))
        hift.detach()
    assert losses[0] == losses[1]
    assert differing(weights(model), weights(other)) == []


def test_a_model_whose_host_memory_can_not_be_pinned_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(torch.bfloat16, blocks=BLOCKS)
    before = weights(model)

    def refuse(*ignored: Any) -> None:
        raise RuntimeError("can't be pinned")

    monkeypatch.setattr("slivertune.parked.host_weights.claimed_host_memory", refuse)
    with pytest.raises(RuntimeError, match="can't be pinned"):
        HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(waiting="int8", **HOST), lr=1e-3)
    assert differing(weights(model), before) == []
    assert all(each.requires_grad for each in model.parameters())
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in model.modules())


# ---- bytes


# test_waiting.py counts int8, and one layer in a group.
@pytest.mark.parametrize(
    ("form", "layers_per_group", "num_resident"),
    quick(itertools.product(["int8", "nf4"], [1, 2], [0, 2]), [("nf4", 2, 2)]),
)
def test_the_device_holds_the_slots_the_exact_rest_and_the_active_group(
    form: str, layers_per_group: int, num_resident: int
) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model = seeded(lambda: LlamaForCausalLM(config), 0).to(torch.bfloat16)
    enable_checkpointing(model)
    sizes = {name: each.nbytes for name, each in model.named_parameters()}
    linear = {name for name, each in model.named_parameters() if each.ndim == 2 and ".layers." in name}
    bits_of = {"int8": 8.25, "nf4": 4.127}[form]
    # Constant tables of NF4, and each tensor's beginning at a multiple of 64 bytes.
    around = 6 * 64 + (4 * (16 + 256 + 1) if form == "nf4" else 0)

    def of_block(index: int) -> list[str]:
        return [name for name in sizes if f".layers.{index}." in name]

    coded = sum(sizes[name] / 16 * bits_of + around if name in linear else sizes[name] for name in of_block(0))
    piece, prefetch = 2**18, 2**18
    settings: Any = {
        "waiting": form, "weights": "host", "layers_per_group": layers_per_group, "stream_bytes": piece,
        "prefetch_bytes": prefetch, "resident_bytes": round(num_resident * coded),
    }  # fmt: skip
    gc.collect()
    with Ledger(model) as ledger:
        batches = token_batches(2, vocab=64)
        hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(**settings), lr=1e-3)
        train(model, hift, batches, hift.num_groups)
        gc.collect()
        ledger.reset_peak()
        train(model, hift, batches, hift.num_groups + 1, start=hift.num_groups)
        host_codes = hift.turns.parked.host_bytes
    rest = sum(size for name, size in sizes.items() if ".layers." not in name)
    rest += sum(each.nbytes for each in model.buffers())
    slots = 2 + layers_per_group
    active = layers_per_group * sum(sizes[name] for name in of_block(0))
    # The new codes of one weight lie beside it until they are in the slot.
    turned = max(sizes[name] for name in linear)
    assert ledger.highest.parameters <= (slots + num_resident) * coded + rest + active + turned
    assert ledger.highest.parameters < sum(sizes.values()) * (0.4 if form == "nf4" and layers_per_group == 1 else 0.8)
    assert ledger.highest.gradients <= max(rest, active)
    assert ledger.highest.state <= 2 * piece + prefetch
    assert host_codes <= (8 - num_resident) * coded


def test_no_more_than_a_block_of_codes_and_a_weight_are_on_the_device_while_it_is_built() -> None:
    model = tiny_llama(torch.bfloat16, blocks=12)
    gc.collect()
    block = sum(each.nbytes for each in model.get_submodule("model.layers.0").parameters())
    with Ledger() as ledger:
        hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(waiting="int8", **HOST), lr=1e-3)
    # On a CPU the model itself lies on "the device", and is not counted: it was there before.
    assert ledger.highest.parameters <= 1.5 * block
    del hift
