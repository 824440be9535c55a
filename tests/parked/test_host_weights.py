"""Weights that wait on the host: the bits of resident ones, whatever is late, and the device's bytes are bounded."""

import copy
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slivertune import HiFTConfig, Ledger, TokenTune
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.parked import streamed_blocks
from slivertune.parked.streamed_model import choose_resident, compute_device
from tests.helpers.delayed_streams import DelayedStreams, delayed
from tests.helpers.models import assert_all_moved, assert_same_bits, tiny_llama, token_batches, twin, weights
from tests.helpers.pairwise import pairwise, rotated
from tests.helpers.ranks import quick
from tests.helpers.reference import NaiveHiFT, naive_groups, train
from tests.hift.cases import OPTIMIZERS, hift_over

BLOCKS = 5
LAYERS = BLOCKS + 2
STEPS = 2 * LAYERS + 1
BLOCK_ELEMENTS = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
BATCHES = token_batches(2 * STEPS)


def model_of(dtype: torch.dtype = torch.bfloat16, checkpointing: str | None = None) -> Any:
    """Five blocks; `checkpointing` is None, "plain" or "reentrant"."""
    model = tiny_llama(dtype, blocks=BLOCKS)
    if checkpointing is not None:
        enable_checkpointing(model, {"use_reentrant": checkpointing == "reentrant"})
    return model


def trained(
    model: nn.Module,
    steps: int = STEPS,
    *,
    name: str = "AdamW",
    selects: bool = False,
    accumulation: int = 1,
    **config: Any,
) -> Any:
    """A copy of a model, trained."""
    other, hift = hift_over(twin(model), name, **{"stream_bytes": 20_000, **config})
    handle = TokenTune(ratio=0.5, seed=0).attach(other) if selects else None
    train(other, hift, BATCHES, steps, accumulation=accumulation)
    if handle is not None:
        handle.remove()
    return other


# Of their pairs each is in test_pairwise.py.
@rotated(dtype=[torch.float32, torch.bfloat16], layers_per_group=[1, 4], checkpointing=["plain", None])
def test_two_cycles_and_a_turn_are_those_of_the_naive_reference(
    dtype: torch.dtype, layers_per_group: int, checkpointing: str | None
) -> None:
    model = model_of(dtype, checkpointing)
    plain = twin(model)
    reference = NaiveHiFT(
        plain, torch.optim.AdamW, groups=naive_groups(plain, layers_per_group), **OPTIMIZERS["AdamW"][1]
    )
    steps = 2 * -(-LAYERS // layers_per_group) + 1
    train(plain, reference, BATCHES, steps)
    assert_all_moved(plain, weights(model))
    for resident_bytes in (0, 3 * 2 * BLOCK_ELEMENTS):
        found = trained(model, steps, weights="host", layers_per_group=layers_per_group, resident_bytes=resident_bytes)
        assert_same_bits(found, plain)


SETTINGS: list[dict[str, Any]] = [
    {"selects": True},
    {"selects": True, "checkpointing": "plain", "layers_per_group": 4},
    {"name": "transformers Adafactor"},
]
"""Those that test_pairwise.py does not have."""


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_have_the_bits_of_resident_weights(settings: dict[str, Any]) -> None:
    settings = {**settings}
    model = model_of(torch.bfloat16, settings.pop("checkpointing", None))
    steps = 2 * -(-LAYERS // settings.get("layers_per_group", 1)) + 1
    expected = trained(model, steps, **settings)
    assert_all_moved(expected, weights(model))
    assert_same_bits(trained(model, steps, weights="host", resident_bytes=4 * BLOCK_ELEMENTS, **settings), expected)


def test_a_missing_wait_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    expected = trained(model)
    monkeypatch.setattr(DelayedStreams, "compute_after", lambda self, event: None)
    with delayed(None):
        found = trained(model, weights="host", resident_bytes=0)
        with pytest.raises(AssertionError):
            assert_same_bits(found, expected)


@pytest.mark.parametrize("saves_views", [False, True])
@pytest.mark.parametrize("checkpointing", [None, "plain"])
def test_a_backward_finds_its_weights_wherever_they_come_to(
    checkpointing: str | None, saves_views: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(torch.bfloat16, checkpointing)
    expected = trained(model, LAYERS)
    if saves_views:
        monkeypatch.setattr(streamed_blocks.StreamedBlocks, "_pack", lambda self, pack, tensor: pack(tensor))
    other, hift = hift_over(twin(model), "AdamW", weights="host", resident_bytes=0, stream_bytes=20_000)
    slots = hift.turns.parked.streamed.blocks.weights
    for batch in BATCHES[:LAYERS]:
        loss = other(**batch).loss
        slots.forget()
        slots._slots.reverse()
        loss.backward()
        hift.step()
    if saves_views and checkpointing is None:
        with pytest.raises(AssertionError):
            assert_same_bits(other, expected)
    else:
        assert_same_bits(other, expected)


@pytest.mark.parametrize(
    ("layers_per_group", "num_blocks_trained", "num_resident"),
    quick([(1, 1, 0), (1, 1, 2), (4, 4, 0), (4, 4, 2)], [(1, 1, 2), (4, 4, 0)]),
)
def test_the_device_holds_the_exact_rest_the_resident_blocks_and_the_slots(
    layers_per_group: int, num_blocks_trained: int, num_resident: int
) -> None:
    block_bytes, config = 2 * BLOCK_ELEMENTS, {"layers_per_group": layers_per_group, "stream_bytes": 65_536}
    place = {"weights": "host", "resident_bytes": num_resident * (block_bytes + 1024)}
    highest, host = {}, {}
    for name, more in (("host", place), ("device", {})):
        model, hift = hift_over(model_of(torch.bfloat16, "plain"), "AdamW", **config, **more)
        rest = sum(each.nbytes for each in model.parameters()) - BLOCKS * block_bytes
        buffers = sum(each.nbytes for each in model.buffers())
        train(model, hift, BATCHES, len(hift.groups))  # what is measured of steps is no weight
        with Ledger(model) as ledger:
            train(model, hift, BATCHES, len(hift.groups), start=len(hift.groups))
            highest[name], host[name] = ledger.highest.parameters, ledger.current().host
    assert host["host"] - host["device"] == (BLOCKS - num_resident) * block_bytes
    slots = min(2 + num_blocks_trained, BLOCKS - num_resident)
    most = rest + buffers + (num_resident + slots) * (block_bytes + 1024)
    assert most - (num_resident + slots) * 1024 <= highest["host"] <= most
    assert highest["device"] == rest + buffers + BLOCKS * block_bytes


def test_streamed_blocks_are_spread() -> None:
    assert choose_resident([10] * 8, 80) == frozenset(range(8))
    assert choose_resident([10] * 8, 79) == frozenset(range(8)) - {4}
    assert choose_resident([10] * 8, 60) == frozenset(range(8)) - {2, 6}
    assert choose_resident([10] * 8, 9) == frozenset()
    assert choose_resident([10, 30, 10, 10], 40) == frozenset({0, 2})


def true_values_between_steps(**config: Any) -> None:
    model = model_of(torch.bfloat16, "plain")
    first, resident = hift_over(twin(model), "AdamW", **config)
    second, streamed = hift_over(twin(model), "AdamW", weights="host", resident_bytes=0, **config)
    for index in range(resident.cycle_length + 2):
        train(first, resident, BATCHES, 1, start=index)
        train(second, streamed, BATCHES, 1, start=index)
        assert_same_bits(second, first)


def test_whoever_reads_a_weight_between_steps_reads_its_value() -> None:
    with delayed(None):
        true_values_between_steps()
    with delayed(3):
        true_values_between_steps(layers_per_group=3)


def halve(model: nn.Module, way: str) -> None:
    if way == "load_state_dict":
        model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
    for parameter in model.parameters():
        if way == "data":
            parameter.data.copy_(0.5 * parameter.data)
        elif way == "other data":
            parameter.data = 0.5 * parameter.data
        elif way == "copy_":
            with torch.no_grad():
                parameter.mul_(0.5)


def halved_between_steps(way: str, **config: Any) -> Any:
    """A model whose weights are halved three times while it trains."""
    model, hift = hift_over(model_of(), "AdamW", **config)
    for index in range(LAYERS + 2):
        train(model, hift, BATCHES, 1, start=index)
        if index % 3 == 1:
            halve(model, way)
    return model


@functools.cache
def resident_and_halved() -> Any:
    """The same whichever way the weights are written."""
    return halved_between_steps("copy_")


@pytest.mark.parametrize("way", ["data", "other data", "copy_", "load_state_dict"])
def test_whoever_writes_a_weight_between_steps_is_heard(way: str) -> None:
    with delayed(None):
        streamed = halved_between_steps(way, weights="host", resident_bytes=0)
        assert_same_bits(streamed, resident_and_halved())


@pytest.mark.parametrize("way", ["data", "other data", "copy_", "load_state_dict"])
def test_whoever_writes_a_weight_after_ctrl_c_is_heard(way: str) -> None:
    # The block of the last turn is on its way to the host while the first one runs; a state dict waits for it.
    begin = 0 if way == "load_state_dict" else 1

    def trained_after_ctrl_c(**config: Any) -> Any:
        model, hift = hift_over(model_of(torch.bfloat16, "plain"), "AdamW", **config)
        train(model, hift, BATCHES, 3)

        def interrupt(*ignored: Any) -> None:
            raise KeyboardInterrupt

        for layer in model.model.layers[begin:]:
            hook = layer.mlp.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(**BATCHES[0])
            hook.remove()
            halve(model, way)
        train(model, hift, BATCHES, LAYERS, start=3)
        return model

    with delayed(None):
        assert_same_bits(trained_after_ctrl_c(weights="host", resident_bytes=0), trained_after_ctrl_c())


def test_a_run_resumes_in_mid_cycle_with_the_same_bits() -> None:
    model = model_of(torch.bfloat16, "plain")
    expected = trained(model, 2 * LAYERS)
    config = {"weights": "host", "resident_bytes": 4 * BLOCK_ELEMENTS, "stream_bytes": 20_000}
    with delayed(None):
        for cut in (3, LAYERS + 2):
            first, hift = hift_over(twin(model), "AdamW", **config)
            train(first, hift, BATCHES, cut)
            saved = copy.deepcopy((first.state_dict(), hift.state_dict()))
            second, other = hift_over(model_of(torch.bfloat16, "plain"), "AdamW", **config)
            train(second, other, BATCHES, 2)
            second.load_state_dict(saved[0])
            other.load_state_dict(saved[1])
            train(second, other, BATCHES, 2 * LAYERS - cut, start=cut)
            assert_same_bits(second, expected)


def test_evaluation_and_generation_compute_what_resident_weights_do() -> None:
    model = model_of()
    first, resident = hift_over(twin(model), "AdamW")
    with delayed(None):
        second, streamed = hift_over(twin(model), "AdamW", weights="host", resident_bytes=2 * BLOCK_ELEMENTS)
        for index in range(LAYERS + 2):
            train(first, resident, BATCHES, 1, start=index)
            train(second, streamed, BATCHES, 1, start=index)
            with torch.no_grad() if index % 2 else torch.inference_mode():
                assert torch.equal(second(**BATCHES[-1]).logits, first(**BATCHES[-1]).logits)
            prompt = BATCHES[0]["input_ids"][:, :4]
            texts = [
                each.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0) for each in (first, second)
            ]
            assert torch.equal(*texts)
        assert_same_bits(second, first)


def places(model: nn.Module) -> list[int]:
    """Addresses of a weight of each block."""
    return [block.mlp.up_proj.weight.data_ptr() for block in model.model.layers]  # type: ignore[union-attr, operator]


SOME_RESIDENT = 3 * BLOCK_ELEMENTS


@pytest.mark.parametrize(
    ("waiting", "resident_bytes"),
    quick(itertools.product([None, "int8"], [0, SOME_RESIDENT]), [(None, SOME_RESIDENT), ("int8", 0)]),
)
def test_a_detached_model_evaluates_on_the_device_and_its_training_goes_on(waiting: Any, resident_bytes: int) -> None:
    config: dict[str, Any] = {"weights": "host", "waiting": waiting, "resident_bytes": resident_bytes}
    model = model_of()
    expected, undisturbed = hift_over(twin(model), "AdamW", **config)
    with delayed(None):
        other, hift = hift_over(twin(model), "AdamW", **config)
        inside: list[int] = []
        for start in (0, 4):
            train(expected, undisturbed, BATCHES, 4, start=start)
            train(other, hift, BATCHES, 4, start=start)
            hift.detach(for_inference=True)
            assert all(each.requires_grad for each in other.parameters())
            plain, outside = twin(other), places(other)
            plain.load_state_dict(other.state_dict())
            hooks = [
                block.mlp.register_forward_pre_hook(lambda mlp, _: inside.append(mlp.up_proj.weight.data_ptr()))
                for block in other.model.layers
            ]
            with torch.no_grad():
                assert torch.equal(other(**BATCHES[-1]).logits, plain(**BATCHES[-1]).logits)
            for hook in hooks:
                hook.remove()
            moved = [a != b for a, b in zip(inside, outside, strict=True)]
            assert all(moved) if resident_bytes == 0 else any(moved)
            assert places(other) == outside
            inside.clear()
            hift.reattach()
        train(expected, undisturbed, BATCHES, LAYERS, start=8)
        train(other, hift, BATCHES, LAYERS, start=8)
        hift.detach()
        undisturbed.detach()
    assert_same_bits(other, expected)


@pytest.mark.parametrize("ends", ["detach", "cast", "another HiFT", "HiFT over a wrapper", "a gradient"])
def test_blocks_stay_on_the_host_once_nobody_evaluates_any_more(ends: str) -> None:
    model = model_of()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    hift = hift_over(model, "AdamW", weights="host", resident_bytes=0)[1]
    train(model, hift, BATCHES, 2)
    hift.detach(for_inference=True)
    hift.detach(for_inference=True)
    assert {name: set(vars(module)) for name, module in model.named_modules()} != before
    if ends == "detach":
        hift.detach()
    elif ends == "cast":
        model.float()
        assert {each.dtype for each in model.parameters()} == {torch.float32}
    elif ends == "another HiFT":
        hift_over(model, "AdamW", weights="host", resident_bytes=0)[1].detach()
    elif ends == "HiFT over a wrapper":
        hift_over(nn.ModuleDict({"inner": model}), "AdamW", weights="host", resident_bytes=0)[1].detach()
    else:
        model(**BATCHES[0]).loss.backward()
        assert all(each.grad is not None for each in model.parameters())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda parameter: parameter.mul_(1.5),
    "other data": lambda parameter: setattr(parameter, "data", parameter.detach() * 1.5),
}


@pairwise(
    moves=["nothing", "a cast and back", "detach and again", "reattach"], waiting=[None, "int8"], write=list(WRITES)
)
def test_whatever_is_written_to_a_detached_model_is_what_it_computes_with(waiting: Any, moves: str, write: str) -> None:
    """Also if a part of the model alone is called, as generation does through an adapter, and after the optimizer."""
    model, hift = hift_over(model_of(), "AdamW", weights="host", waiting=waiting, resident_bytes=0)
    train(model, hift, BATCHES, 3)
    hift.detach(for_inference=True)
    ids = BATCHES[-1]["input_ids"]
    with torch.no_grad():
        model.model(input_ids=ids)
        if moves == "a cast and back":
            model.float().bfloat16()
        elif moves == "detach and again":
            hift.detach()
        for parameter in model.model.layers.parameters():
            WRITES[write](parameter)
    plain = model_of()
    plain.load_state_dict(model.state_dict())
    if moves == "detach and again":
        hift.detach(for_inference=True)
    elif moves == "reattach":
        hift.reattach()
        hift.detach(for_inference=True)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model.model(input_ids=ids)[0], plain.model(input_ids=ids)[0])
            assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        if hift is not None:
            hift = None  # type: ignore[assignment]
            gc.collect()


def test_trainings_of_two_hifts_take_turns_over_one_model() -> None:
    config: dict[str, Any] = {"weights": "host", "resident_bytes": 0, "stream_bytes": 20_000}
    models = []
    for place in ({"weights": "device", "stream_bytes": 20_000}, config):
        model = twin(model_of())
        first = hift_over(model, "AdamW", **place)[1]
        train(model, first, BATCHES, LAYERS)
        first.detach(for_inference=True)
        second = hift_over(model, "AdamW", **place)[1]
        train(model, second, BATCHES, LAYERS, start=LAYERS)
        second.detach(for_inference=True)
        first.reattach()
        train(model, first, BATCHES, 2)
        first.detach()
        models.append(model)
    assert_same_bits(*models)


def test_a_plan_pins_nothing_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    model = model_of()
    assert compute_device(model) == torch.device("cuda", 0)
    with FakeTensorMode():
        assert compute_device(model) == torch.device("cpu")


@pytest.mark.parametrize("value", ["all", -1, 1.5, True])
def test_a_wrong_number_of_bytes_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="resident_bytes="):
        HiFTConfig.paper(weights="host", resident_bytes=value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"resident_bytes": 5}, r'for offloaded weights\. Set weights="host"'),
        ({"weights": "disk"}, "weights='disk' must be one of"),
        ({"weights": "host", "state": "device"}, r'Use state="host" or "disk"'),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HiFTConfig.paper(**settings)
