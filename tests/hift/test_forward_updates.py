"""`update="forward"`: an update is applied in the next forward, with the bits of one that is applied in its step."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import HiFT, HiFTConfig, TokenTune
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.hift.streamed import StreamedGroup
from tests.helpers.delayed_streams import delayed
from tests.helpers.models import (
    LAYERS,
    assert_all_moved,
    assert_same_bits,
    tiny_gpt2,
    tiny_llama,
    token_batches,
    twin,
    weights,
)
from tests.hift.cases import BIG_VOCAB, UPDATES, hift_over, run


def over(model: nn.Module, name: str = "AdamW", **config: Any) -> tuple[Any, HiFT]:
    return hift_over(twin(model), name, **{"gradients": "host", "stream_bytes": 20_000, **config})


def compare(model: nn.Module, name: str = "AdamW", *, seed: int | None = 0, **settings: Any) -> None:
    """Losses of every step, and weights and state at the end."""
    config = {key: settings.pop(key) for key in tuple(settings) if key not in ("accumulation", "clip")}
    expected, at_once = over(model, name, **config)
    losses = run(expected, at_once, hift=at_once, **settings)
    assert_all_moved(expected, weights(model))
    with delayed(seed) as streams:
        found, later = over(model, name, update="forward", **config)
        found_losses = run(found, later, hift=later, **settings)
        later.flush()
    assert sum(each.num_late for each in streams) > 0
    assert torch.equal(torch.stack(found_losses), torch.stack(losses))
    assert_same_bits(found, expected)
    assert later.updates == at_once.updates == UPDATES
    one, other = later.state_dict(), at_once.state_dict()
    for key, values in other["state"].items():
        for part, value in values.items():
            assert torch.equal(torch.as_tensor(one["state"][key][part]), torch.as_tensor(value)), (key, part)


@pytest.mark.parametrize("layers_per_group", [1, 2, LAYERS])
@pytest.mark.parametrize("prefetch_bytes", [0, 60_000, 10**9])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_no_bit_differs_whatever_is_loaded_ahead(layers_per_group: int, prefetch_bytes: int, seed: int | None) -> None:
    model = tiny_llama(torch.bfloat16, vocab=BIG_VOCAB)
    compare(model, seed=seed, layers_per_group=layers_per_group, prefetch_bytes=prefetch_bytes)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "AdamW8bit", "torch Adafactor"])
@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.1), (4, None), (4, 0.1)])
def test_no_bit_differs_over_any_optimizer_with_accumulation_and_clipping(
    name: str, accumulation: int, clip: float | None
) -> None:
    model = tiny_llama(torch.bfloat16, vocab=BIG_VOCAB)
    more = {"master": "split"} if name == "SGD momentum" else {}
    compare(model, name, layers_per_group=2, prefetch_bytes=60_000, accumulation=accumulation, clip=clip, **more)


@pytest.mark.parametrize(
    "config", [{"steps_per_group": 2}, {"order": "top2down"}, {"order": "random"}, {"stream_bytes": 0}]
)
def test_no_bit_differs_in_other_orders_and_pieces(config: dict[str, Any]) -> None:
    compare(tiny_llama(torch.bfloat16), prefetch_bytes=60_000, **config)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama], ids=["tied", "fp32"])
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("tokens", [False, True])
def test_no_bit_differs_with_checkpointing_and_selected_tokens(
    make: Callable[[], nn.Module], reentrant: bool | None, tokens: bool
) -> None:
    found = []
    for update in ("step", "forward"):
        model, hift = over(make(), update=update, layers_per_group=2, prefetch_bytes=60_000)
        if reentrant is not None:
            enable_checkpointing(model, {"use_reentrant": reentrant})
        with ExitStack() as stack:
            if tokens:
                stack.enter_context(TokenTune(ratio=0.5).attach(model))
            run(model, hift)
        hift.flush()
        found.append(model)
    assert_same_bits(*found)


def pending() -> tuple[Any, HiFT, Any]:
    """A model whose last update waits, and one whose does not."""
    start = tiny_llama(torch.bfloat16)
    expected, at_once = over(start, layers_per_group=2)
    model, hift = over(start, layers_per_group=2, update="forward")
    for each, stepping in ((expected, at_once), (model, hift)):
        run(each, stepping, 4)
    assert any(not torch.equal(one, two) for one, two in zip(model.parameters(), expected.parameters(), strict=True))
    return model, hift, expected


def saved(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize(
    "touch",
    [
        lambda model, hift: hift.flush(),
        lambda model, hift: hift.step(),
        lambda model, hift: hift.state_dict(),
        lambda model, hift: hift.detach(),
        lambda model, hift: model.eval(),
        lambda model, hift: model.to("cpu"),
        lambda model, hift: model.state_dict(),
        lambda model, hift: model.model.layers[1].state_dict(),
        lambda model, hift: torch.no_grad()(model)(input_ids=torch.ones(1, 4, dtype=torch.long)),
        lambda model, hift: model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, pad_token_id=0),
        lambda model, hift: model.model(input_ids=torch.ones(1, 4, dtype=torch.long)),
        lambda model, hift: copy.deepcopy(model),
        lambda model, hift: pickle.dumps(model),
    ],
)
def test_what_reads_the_weights_finds_the_update(touch: Callable[[Any, HiFT], Any]) -> None:
    model, hift, expected = pending()
    touch(model, hift)
    assert_same_bits(model, expected)


def test_copies_and_files_hold_the_update() -> None:
    model, _, expected = pending()
    assert_same_bits(copy.deepcopy(model), expected)
    for make in (saved, lambda each: pickle.loads(pickle.dumps(each)).state_dict(), lambda each: each.state_dict()):
        model, _, expected = pending()
        values = make(model)
        assert all(torch.equal(values[name], value) for name, value in expected.state_dict().items())


def test_what_is_loaded_comes_after_the_update() -> None:
    model, hift, expected = pending()
    loaded = {name: torch.full_like(value, 0.5) for name, value in expected.state_dict().items()}
    model.load_state_dict(loaded)
    hift.flush()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    # The optimizer's own: what waited belongs to what was before.
    model, hift, expected = pending()
    other, saving = over(tiny_llama(torch.bfloat16), layers_per_group=2)
    run(other, saving, 3)
    hift.load_state_dict(copy.deepcopy(saving.state_dict()))
    model.load_state_dict(other.state_dict())
    run(model, hift, 3, start=3)
    run(other, saving, 3, start=3)
    hift.flush()
    assert_same_bits(model, other)


def test_a_dropped_optimizer_applies_what_waits() -> None:
    model, hift, expected = pending()
    del hift
    gc.collect()
    assert_same_bits(model, expected)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "train" not in vars(model) and "_apply" not in vars(model)


@pytest.mark.parametrize("cut", range(1, UPDATES))
def test_a_resumed_run_has_the_same_bits(cut: int) -> None:
    start = tiny_llama(torch.bfloat16)
    expected, whole = over(start, layers_per_group=2)
    run(expected, whole)
    model, hift = over(start, layers_per_group=2, update="forward")
    run(model, hift, cut)
    state, values = copy.deepcopy(hift.state_dict()), copy.deepcopy(model.state_dict())
    other, resumed = over(tiny_llama(torch.bfloat16), layers_per_group=2, update="forward")
    other.load_state_dict(values)
    resumed.load_state_dict(state)
    run(other, resumed, UPDATES - cut, start=cut)
    resumed.flush()
    assert_same_bits(other, expected)


def test_a_weight_that_is_written_to_or_gets_a_gradient_meanwhile_is_an_error() -> None:
    model, hift, _ = pending()
    waiting = hift._forward_updates._update
    assert waiting is not None
    weight = waiting.waiting()[-1]
    with torch.no_grad():
        weight.parameter.mul_(2)
    with pytest.raises(RuntimeError, match=rf"{weight.name} was written to while .*optimizer\.flush\(\)"):
        model(**token_batches(1)[0])
    with pytest.raises(RuntimeError, match="was written to"):
        hift.detach()
    with pytest.warns(RuntimeWarning, match=f"dropped, and an update with it: {weight.name} was written to"):
        hift._take_off()
    model, hift = over(tiny_llama(torch.bfloat16), layers_per_group=LAYERS, update="forward")
    loss = model(**token_batches(1)[0]).loss
    loss.backward(retain_graph=True)
    hift.step()
    with pytest.raises(RuntimeError, match=r"got a gradient while .* run a forward between"):
        loss.backward()
    model.zero_grad()
    hift.flush()


def test_an_update_that_fails_in_the_forward_is_an_error_until_a_checkpoint_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, hift = over(tiny_llama(torch.bfloat16), layers_per_group=LAYERS, update="forward")
    run(model, hift, 2)
    saved_model, saved_hift = copy.deepcopy(model.state_dict()), copy.deepcopy(hift.state_dict())
    run(model, hift, 1, start=2)
    step_piece, count = StreamedGroup._step_piece, 0

    def fail_in_the_middle(self: Any, *args: Any) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise torch.OutOfMemoryError("no memory")
        step_piece(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(StreamedGroup, "_step_piece", fail_in_the_middle)
        with pytest.raises(torch.OutOfMemoryError):
            model(**token_batches(4)[3])
    for touch in (lambda: model(**token_batches(4)[3]), hift.step, hift.state_dict, model.state_dict, hift.flush):
        with pytest.raises(RuntimeError, match=r"an update failed at \S+ \(OutOfMemoryError\), in the forward after"):
            touch()
    model.load_state_dict(saved_model)
    hift.load_state_dict(saved_hift)
    run(model, hift, 3, start=2)
    hift.flush()
    expected, at_once = over(tiny_llama(torch.bfloat16), layers_per_group=LAYERS)
    run(expected, at_once, 5)
    assert_same_bits(model, expected)


def test_what_does_not_go_together_is_refused() -> None:
    for config in ({}, {"gradients": "stepped"}, {"gradients": "host", "state": "discard"}):
        with pytest.raises(ValueError, match='update="forward" needs gradients and state that wait on the host'):
            HiFTConfig(update="forward", **config)
    with pytest.raises(ValueError, match="update='later' must be one of 'step', 'forward'"):
        HiFTConfig(update="later")  # type: ignore[arg-type]
    model, hift = over(tiny_llama(torch.bfloat16), update="forward")
    for layout, name in (("ddp", "DDP"), ("fsdp2", "FSDP2"), ("zero2", "ZeRO")):
        assert hift.unsupported(layout) == f"update='forward' is for one device, and not for {name}; set update='step'"
    assert hift.unsupported("single") is None
    run(model, hift, 1)
    model.model.layers[0].compile()
    with pytest.raises(RuntimeError, match="a compiled layer does not wait for that"):
        model(**token_batches(2)[1])


def test_the_trainer_says_train_before_every_step_and_nothing_is_applied_for_that() -> None:
    model, hift, expected = pending()
    model.train()
    assert hift._forward_updates is not None and hift._forward_updates.residency is not None
    model.train(False)
    assert hift._forward_updates.residency is None
    assert_same_bits(model, expected)


def test_hyperparameters_are_those_of_the_step() -> None:
    start = tiny_llama(torch.bfloat16)
    found = []
    for update in ("step", "forward"):
        model, hift = over(start, update=update, layers_per_group=2)
        for index in range(6):
            for group in hift.param_groups:
                group["weight_decay"] = 0.1 * (index % 3)
            run(model, hift, 1, start=index)
        hift.flush()
        found.append(model)
    assert_same_bits(*found)


def test_a_forward_that_fails_in_its_middle_leaves_the_rest_for_the_next() -> None:
    model, hift, expected = pending()

    def fail(*ignored: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(**token_batches(5)[4])
    handle.remove()
    hift.flush()
    assert_same_bits(model, expected)
