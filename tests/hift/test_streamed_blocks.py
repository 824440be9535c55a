"""Blocks whose weights wait on the host: many architectures, what may happen to a model, and what is refused."""

import copy
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from slivertune import HiFT, attach, keep_activations, prepare
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.copy_streams import CopyStreams
from slivertune.parked import streamed_model
from tests.helpers.accelerator import forgotten, one_device
from tests.helpers.architectures import BART, T5, hf, ids_and_decoder_ids, lora_llama
from tests.helpers.delayed_streams import delayed
from tests.helpers.models import (
    assert_all_moved,
    assert_same_bits,
    differing,
    seeded,
    tiny_bert,
    tiny_gpt2,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mixtral,
    token_batches,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.reference import train
from tests.hift.cases import hift_over

BATCHES = token_batches(20)
HOST: dict[str, Any] = {"weights": "host", "resident_bytes": 0, "stream_bytes": 20_000}


def t5() -> nn.Module:
    config = hf.T5Config(**{**T5, "num_layers": 3}, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return seeded(lambda: hf.T5ForConditionalGeneration(config), 0)


def bart() -> nn.Module:
    config = hf.BartConfig(**BART, dropout=0.0, decoder_start_token_id=2, pad_token_id=0, use_cache=False)
    return seeded(lambda: hf.BartForConditionalGeneration(config), 0)


def pairs() -> list[dict[str, torch.Tensor]]:
    batch = ids_and_decoder_ids()
    return [{**batch, "labels": batch["decoder_input_ids"]}]


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "tied llama": (lambda: tiny_llama(tied=True), lambda: BATCHES),
    "gpt2": (tiny_gpt2, lambda: BATCHES),
    "mixtral": (tiny_mixtral, lambda: BATCHES),
    "gpt-oss": (tiny_gpt_oss, lambda: BATCHES),
    "t5": (t5, pairs),
    "bart": (bart, pairs),
    "lora": (lora_llama, lambda: [{**b, "labels": b["input_ids"]} for b in token_batches(4, vocab=32)]),
}


@pytest.mark.filterwarnings("ignore:.*parameters do not require gradients:UserWarning")
@rotated(family=FAMILIES, checkpointing=[False, True])
def test_every_family_has_the_bits_of_resident_weights(family: str, checkpointing: bool) -> None:
    build, batches = FAMILIES[family]
    models = [build() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models if checkpointing else ():
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        enable_checkpointing(inner, {"use_reentrant": False})
    before = weights(models[0])
    first, resident = hift_over(models[0], "AdamW")
    train(first, resident, batches(), resident.num_groups + 2)
    with delayed(None):
        second, streamed = hift_over(models[1], "AdamW", **HOST)
        train(second, streamed, batches(), resident.num_groups + 2)
        assert_same_bits(second, first)
    if family not in ("lora", "mixtral", "gpt-oss"):  # experts that no token chose
        assert_all_moved(first, before)


def both(**config: Any) -> tuple[Any, HiFT, Any, HiFT]:
    model = tiny_llama(torch.bfloat16, blocks=4)
    return (*hift_over(twin(model), "AdamW", **config), *hift_over(twin(model), "AdamW", **{**HOST, **config}))


def test_detach_leaves_a_model_as_any_other_and_reattach_goes_on() -> None:
    with delayed(None):
        first, resident, second, streamed = both()
        train(first, resident, BATCHES, 7)
        train(second, streamed, BATCHES, 7)
        resident.detach()
        streamed.detach()
        assert_same_bits(second, first)
        block = second.model.layers[1]
        assert not block._forward_pre_hooks and not block._forward_hooks and "_apply" not in vars(block)
        assert torch.equal(second(**BATCHES[0]).logits, first(**BATCHES[0]).logits)
        resident.reattach()
        streamed.reattach()
        train(first, resident, BATCHES, 7, start=7)
        train(second, streamed, BATCHES, 7, start=7)
        assert_same_bits(second, first)


def test_a_dropped_optimizer_leaves_the_weights() -> None:
    with delayed(None):
        first, resident, second, streamed = both()
        train(first, resident, BATCHES, 4)
        train(second, streamed, BATCHES, 4)
        second(**BATCHES[0]).loss.backward()
        del streamed
        gc.collect()
        assert_same_bits(second, first)
        assert not second.model.layers[0]._forward_pre_hooks
        assert second.float().dtype == torch.float32


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    first, resident, second, streamed = both()
    train(first, resident, BATCHES, 4)
    train(second, streamed, BATCHES, 4)
    copied = copy.deepcopy(second)
    assert_same_bits(copied, first)
    train(second, streamed, BATCHES, 3)
    assert_same_bits(copied, first)
    assert torch.equal(copied(**BATCHES[0]).logits, first(**BATCHES[0]).logits)


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_pass_that_fails_in_its_midst_changes_nothing(moment: str) -> None:
    def fail(*ignored: Any) -> None:
        raise ValueError("no luck")

    with delayed(None):
        first, resident, second, streamed = both(layers_per_group=2)
        for index in range(9):
            train(first, resident, BATCHES, 1, start=index)
            train(second, streamed, BATCHES, 1, start=index)
            block = second.model.layers[2].mlp
            handle = (
                block.register_forward_pre_hook(fail)
                if moment == "forward"
                else block.register_full_backward_hook(fail)
            )
            with suppress(ValueError):  # a backward may end above that block
                second(**BATCHES[0]).loss.backward()
            handle.remove()
            streamed.zero_grad()
            assert_same_bits(second, first)


def test_a_graph_that_is_kept_may_be_gone_through_twice() -> None:
    with delayed(None):
        first, resident, second, streamed = both()
        for index in range(8):
            for model, hift in ((first, resident), (second, streamed)):
                loss = model(**BATCHES[index]).loss
                loss.backward(retain_graph=True)
                loss.backward()
                hift.step()
        assert_same_bits(second, first)


def test_blocks_that_keep_their_activations_have_the_same_bits() -> None:
    model = tiny_llama(torch.bfloat16, blocks=4)
    enable_checkpointing(model, {"use_reentrant": False})
    first, resident = hift_over(twin(model), "AdamW")
    train(first, resident, BATCHES, 9)
    with delayed(1):
        second, streamed = hift_over(twin(model), "AdamW", **HOST)
        with keep_activations(second, 2):
            train(second, streamed, BATCHES, 9)
        assert_same_bits(second, first)


def test_an_accelerator_moves_nothing_and_a_cast_is_refused(tmp_path: Path) -> None:
    with one_device() as accelerator:
        first, resident, second, streamed = both()
        model, optimizer = prepare(accelerator, second, streamed)
        for index in range(8):
            train(first, resident, BATCHES, 1, start=index)
            accelerator.backward(model(**BATCHES[index]).loss)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(second, first)
    with pytest.raises(RuntimeError, match=r"can't become torch.float32 on cpu: .* Cast or move the model before that"):
        second.float()
    with pytest.raises(RuntimeError, match="on meta"):
        second.to("meta")
    with pytest.raises(RuntimeError, match="Cast or move the model before"):
        second.model.layers[0].half()
    second.to("cpu", torch.bfloat16)
    second.save_pretrained(tmp_path)
    assert_same_bits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), first)


@pytest.mark.parametrize("is_attached", [False, True])
def test_the_trainer_trains_as_with_resident_weights(is_attached: bool, tmp_path: Path) -> None:
    trained = []
    for model, hift in (both()[:2], both()[2:]):
        with forgotten():
            arguments = TrainingArguments(
                str(tmp_path),
                max_steps=7,
                per_device_train_batch_size=2,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                learning_rate=1e-2,
            )
            rows = [{key: value[0] for key, value in batch.items()} for batch in BATCHES[:8]]
            if is_attached:
                config = hift.config
                hift.detach()
                trainer = Trainer(model, arguments, train_dataset=rows)
                attach(trainer, config)
            else:
                trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(hift, None))
            trainer.train()
        trained.append(model)
    assert_same_bits(*trained)
    assert_all_moved(trained[0], weights(tiny_llama(torch.bfloat16, blocks=4)))


@pytest.mark.parametrize("moment", ["in a turn", "after a step"])
def test_programs_that_look_for_tied_weights_save_all_of_a_block(moment: str, tmp_path: Path) -> None:
    with delayed(None):
        first, resident, second, streamed = both()
        train(first, resident, BATCHES, 2)
        train(second, streamed, BATCHES, 2)
        if moment == "in a turn":
            second(**BATCHES[0]).loss.backward()
        with one_device() as accelerator:
            accelerator.save_model(second, str(tmp_path))
        saved = load_file(tmp_path / "model.safetensors")
        assert differing(saved, weights(first)) == [] and saved.keys() == weights(first).keys()
        streamed.zero_grad()
        resident.zero_grad()
        train(first, resident, BATCHES, 6, start=2)
        train(second, streamed, BATCHES, 6, start=2)
        assert_same_bits(second, first)


@pytest.mark.filterwarnings("ignore:.*parameters do not require gradients:UserWarning")
def test_models_whose_blocks_are_no_units_are_refused() -> None:
    shared = tiny_llama(blocks=3)
    shared.model.layers[2].mlp = shared.model.layers[0].mlp
    with pytest.raises(ValueError, match=r"model.layers.2 shares model.layers.0.mlp.* with another block"):
        hift_over(shared, "AdamW", **HOST)
    outside = tiny_llama(blocks=3)
    outside.shadow = outside.model.layers[0].mlp.down_proj
    with pytest.raises(ValueError, match=r"shadow.weight is a weight of the block model.layers.0 and is also read"):
        hift_over(outside, "AdamW", **HOST)
    coded = tiny_llama(blocks=3)
    coded.model.layers[1].codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"layers.1.codes is torch.uint8.*Load the model without quantisation"):
        hift_over(coded, "AdamW", **HOST)
    without = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no nn.ModuleList.*can run block by block"):
        hift_over(without, "AdamW", layers=[["0"], ["1"]], **HOST)


@pytest.mark.parametrize("layout", ["fsdp2", "zero1", "zero2", "zero3"])
def test_layouts_that_share_weights_out_are_refused(layout: Any) -> None:
    _, hift = hift_over(tiny_bert(), "AdamW", **HOST)
    assert "weights='host' brings whole blocks to one device" in (hift.unsupported(layout) or "")
    assert hift.unsupported("ddp") is None and hift.unsupported("single") is None


def test_auto_lets_blocks_stay_in_what_the_first_cycle_has_left_and_gives_them_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with delayed(None):
        first, resident, second, streamed = both(resident_bytes="auto")
        own = streamed.turns.parked.streamed
        size = own.blocks.weights._blocks[0].num_bytes
        room = max(streamed.turns.state_sizes()) + 2 * size
        monkeypatch.setattr(streamed_model.PeakMemory, "unused_bytes", lambda *_: room)
        streamed_blocks = []
        for index in range(14):
            if index == 10:
                streamed.turns._note_lack_of_memory()
            train(first, resident, BATCHES, 1, start=index)
            train(second, streamed, BATCHES, 1, start=index)
            assert_same_bits(second, first)
            streamed_blocks.append(len(own.blocks.weights.streamed))
    assert streamed_blocks == [4] * 5 + [2] * 5 + [4] + [2] * 3


def test_pinned_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CopyStreams, num_bytes: int, *, is_inherited: bool = False) -> torch.Tensor:
        raise RuntimeError(f"{num_bytes:,} bytes of host memory for what waits off the device can't be pinned")

    monkeypatch.setattr(CopyStreams, "host_memory", refuse)
    with pytest.raises(RuntimeError, match="can't be pinned"):
        hift_over(tiny_llama(), "AdamW", **HOST)
