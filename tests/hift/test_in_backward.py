"""Steps inside the backward: the same bits with one gradient alive, and no update left half done in silence.

The length of this file is that of the ways in which a backward can end: each leaves an update in a state of its own.
"""

import copy
import functools
import pickle
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from slivertune import HiFT, HiFTConfig, Ledger
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.hift import host_room
from slivertune.hift.in_backward import SteppedGradient, SteppedGradients
from slivertune.hift.offloaded_state import OffloadedState
from tests.helpers.accelerator import one_device
from tests.helpers.models import (
    LAYERS,
    ODD_LAYERS,
    assert_all_moved,
    assert_same_bits,
    assert_same_tree,
    differing,
    label_batches,
    odd_model,
    small_decoder,
    tiny_bert,
    tiny_gpt2,
    token_batches,
    trainable,
    twin,
    weights,
)
from tests.helpers.pairwise import pairwise, rotated
from tests.helpers.ranks import quick
from tests.helpers.reference import decay_split, grouped_optimizer, train
from tests.helpers.tolerance import assert_sums_close
from tests.hift.cases import BIG_VOCAB, DTYPES, OPTIMIZERS, CountingSGD, cosine, full_disk, hift_over

STEPS = 2 * LAYERS + 2
"""Two cycles and a piece: first turns, which create state, and later ones."""
STREAM_BYTES = 64 * 1024


def pair(
    model: nn.Module,
    name: str = "AdamW",
    *,
    batches: Any = None,
    steps: int = LAYERS + 2,
    split: bool = False,
    **config: Any,
) -> tuple[nn.Module, nn.Module]:
    """Twins after the same run, stepped after the backward and in it."""
    optimizer_class, options = OPTIMIZERS[name]
    batches = batches or token_batches(steps, vocab=int(model.config.vocab_size))  # type: ignore[union-attr, arg-type]
    made = []
    for in_backward in (False, True):
        other = twin(model)
        settings = HiFTConfig.paper(gradients="stepped" if in_backward else "device", **config)
        if split:
            base = grouped_optimizer(other, optimizer_class, decay_split(other), lr=1e-2)
            hift = HiFT.wrap(base, other, config=settings)
        else:
            hift = HiFT(other, optimizer_class, config=settings, **options)
        train(other, hift, batches, steps, scheduler=cosine(hift, steps) if options["lr"] is not None else None)
        assert hift.updates == steps
        made.append(other)
    assert_all_moved(made[0], weights(model))
    return made[0], made[1]


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize(
    "config",
    [{"stream_bytes": 4096}, {"stream_bytes": 0}, {"state": "device"}],
    ids=["streamed", "whole tensors", "device"],
)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "own hyperparameter"])
def test_no_bit_differs_from_a_step_after_the_backward(name: str, config: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same_bits(*pair(small_decoder(dtype, vocab=BIG_VOCAB), name, **config))


def test_groups_with_their_own_decay_change_no_bit() -> None:
    assert_same_bits(*pair(small_decoder(torch.bfloat16), split=True, stream_bytes=4096))


@rotated(layers_per_group=[1, 2], dtype=[torch.bfloat16, torch.float32])
def test_a_tied_embedding_is_stepped_once_when_both_uses_have_given(layers_per_group: int, dtype: torch.dtype) -> None:
    assert_same_bits(*pair(small_decoder(dtype, tied=True), layers_per_group=layers_per_group))
    assert_same_bits(*pair(tiny_gpt2(dtype), layers_per_group=layers_per_group))


def test_a_classifier_and_odd_parameters_too() -> None:
    assert_same_bits(*pair(tiny_bert(), batches=label_batches(LAYERS + 2)))
    odd = odd_model(torch.bfloat16, fp32_gates=True)
    assert_same_bits(*pair(odd, batches=token_batches(10), steps=10, layers=ODD_LAYERS, stream_bytes=4096))


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_weights_without_a_gradient_in_some_steps_are_left_alone(name: str) -> None:
    model = small_decoder(torch.bfloat16)
    made = []
    for place in ({"gradients": "stepped"}, {}, {"state": "device"}):
        # Weights are cut, so that slices get their first state in a turn in which others are on their way already.
        other, hift = hift_over(twin(model), name, layers_per_group=LAYERS, stream_bytes=16_384, **place)
        for index, batch in enumerate(token_batches(6)):
            output = other(**batch)
            # Every other step, the first among them, trains the embedding alone.
            loss = output.loss if index % 2 else other.model.embed_tokens(batch["input_ids"]).square().sum()
            loss.backward()
            hift.step()
        made.append(other)
    assert_same_bits(made[0], made[1])
    assert_same_bits(made[1], made[2])
    assert_all_moved(made[0], weights(model))


def test_the_rate_of_a_cycle_is_read_at_its_first_gradient_and_held() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.SGD, gradients="stepped", lr=0.5)
    for update, batch in enumerate(token_batches(2 * LAYERS)):
        hift.param_groups[0]["lr"] = 0.5 - 0.01 * update
        before = weights(model)
        loss = model(**batch).loss
        active, reference = trainable(model), twin(model)
        reference(**batch).loss.backward()
        gradients = {name: p.grad for name, p in reference.named_parameters() if name in active and p.grad is not None}
        loss.backward()
        hift.step()
        held = 0.5 if update < LAYERS else 0.5 - 0.01 * LAYERS
        assert hift.held_lr == [held] and hift.param_groups[0]["lr"] == 0.5 - 0.01 * update
        for name, gradient in gradients.items():
            weight, change = before[name].double(), held * gradient.double()
            # A product and a difference.
            assert_sums_close(model.get_parameter(name).data, weight - change, 2, weight.abs() + change.abs())


@functools.cache
def never_interrupted() -> Any:
    whole, usual = hift_over(small_decoder(torch.bfloat16), torch.optim.AdamW, lr=1e-2)
    train(whole, usual, token_batches(STEPS), STEPS)
    return whole


MODES = [("device", "stepped"), ("stepped", "host"), ("host", "stepped"), ("host", "host")]


@pytest.mark.parametrize(("mode", "later"), quick(MODES, MODES[:3]))
def test_a_run_resumes_in_mid_cycle_in_either_mode(mode: Any, later: Any) -> None:
    made, batches = small_decoder(torch.bfloat16), token_batches(STEPS)
    first, saving = hift_over(made, torch.optim.AdamW, gradients=mode, stream_bytes=4096, lr=1e-2)
    train(first, saving, batches, 7)
    saved, other = copy.deepcopy(saving.state_dict()), small_decoder(torch.bfloat16, seed=5)
    other.load_state_dict(first.state_dict())
    second, loading = hift_over(other, torch.optim.AdamW, gradients=later, lr=1e-2)
    loading.load_state_dict(saved)
    assert_same_tree(loading.state_dict()["state"], saved["state"])
    train(second, loading, batches, STEPS - 7, start=7)
    assert_same_bits(second, never_interrupted())


def test_own_hyperparameters_of_a_class_declared_elementwise_are_kept() -> None:
    model = small_decoder()
    batches, made = token_batches(STEPS), []
    for in_backward in (False, True):
        config = {"gradients": "stepped" if in_backward else "device", "elementwise": True, "stream_bytes": 4096}
        first, saving = hift_over(twin(model), CountingSGD, lr=0.5, **config)
        train(first, saving, batches, 7)
        saved = copy.deepcopy(saving.state_dict())
        second, loading = hift_over(twin(first), CountingSGD, lr=0.5, **config)
        loading.load_state_dict(saved)
        assert_same_tree(loading.state_dict()["own"], saved["own"])
        train(second, loading, batches, STEPS - 7, start=7)
        assert loading.state_dict()["own"][0] == {0: {"k": 3}}
        made.append(second)
    assert_same_bits(*made)


@pytest.mark.parametrize("place", [{"stream_bytes": STREAM_BYTES}, {"state": "device"}], ids=["streamed", "device"])
def test_about_one_gradient_is_alive_and_two_pieces_of_state(place: dict[str, Any]) -> None:
    found, batches = {}, token_batches(3, vocab=BIG_VOCAB)
    for in_backward in (False, True):
        config = {"gradients": "stepped" if in_backward else "device", "layers_per_group": LAYERS, **place}
        model, hift = hift_over(small_decoder(torch.bfloat16, vocab=BIG_VOCAB), torch.optim.AdamW, lr=1e-3, **config)
        train(model, hift, batches, 2)
        with Ledger(model) as ledger:
            model(**batches[2]).loss.backward()
            assert (ledger.current().gradients == 0) is in_backward
            hift.step()
        found[in_backward] = ledger.highest
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert found[False].gradients == sum(sizes)
    # The engine computes the two gradients of one node (a product's weight and the next) before either is stepped.
    assert max(sizes) <= found[True].gradients <= max(sizes) + 2 * 48 * 32 * 2
    if "stream_bytes" in place:
        assert 0 < found[True].state <= 2 * STREAM_BYTES


def checkpointed(model: Any, reentrant: bool | None, **config: Any) -> tuple[Any, HiFT]:
    """A model that steps in its backward, with that kind of checkpointing; None for none."""
    if reentrant is not None:
        enable_checkpointing(model, {"use_reentrant": reentrant})
    return hift_over(model, torch.optim.AdamW, gradients="stepped", lr=1e-2, **config)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_second_backward_before_step_is_an_error_that_comes_back_until_a_state_is_loaded(
    reentrant: bool | None,
) -> None:
    model, hift = checkpointed(small_decoder(torch.bfloat16), reentrant, layers_per_group=2)
    batches = token_batches(4)
    train(model, hift, batches, 1)
    saved, kept = copy.deepcopy(hift.state_dict()), weights(model)
    model(**batches[1]).loss.backward()
    after_one = weights(model)
    with pytest.raises(RuntimeError, match="got a second gradient before step"):
        model(**batches[2]).loss.backward()
    assert differing(weights(model), after_one) == [], "the second backward must not change a weight"
    assert all(p.grad is None or isinstance(p.grad, SteppedGradient) for p in model.parameters())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="second gradient"):
            hift.step()
    with pytest.raises(RuntimeError, match="second gradient"):
        model(**batches[2]).loss.backward()
    model.load_state_dict(kept)
    hift.load_state_dict(saved)
    expected, usual = hift_over(small_decoder(torch.bfloat16), torch.optim.AdamW, layers_per_group=2, lr=1e-2)
    train(expected, usual, batches, 4)
    train(model, hift, batches, 3, start=1)
    assert_same_bits(model, expected)


class _Fails(torch.autograd.Function):
    """Ends a backward with an error when it is passed."""

    error: type[BaseException] = RuntimeError

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise _Fails.error("stopped here")


@pairwise(
    reentrant=[None, False, True], layers_per_group=[2, LAYERS], error=[torch.OutOfMemoryError, KeyboardInterrupt]
)
def test_a_backward_that_fails_in_its_middle_is_an_error_at_the_step(
    layers_per_group: int, reentrant: bool | None, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Fails, "error", error)
    model, hift = checkpointed(small_decoder(), reentrant, layers_per_group=layers_per_group)
    batches = token_batches(3)
    # With two layers a group, the second and third block have their turn now; it fails between the two.
    train(model, hift, batches, 1)
    saved, kept = copy.deepcopy(hift.state_dict()), weights(model)
    hook = model.model.layers[1].register_forward_hook(lambda module, inputs, output: _Fails.apply(output))
    with pytest.raises(error, match="stopped here"):
        model(**batches[1]).loss.backward()
    hook.remove()
    assert differing(weights(model), kept), "the layers above were stepped, or this tests nothing"
    for call in (hift.step, hift.step, hift.state_dict):
        with pytest.raises(RuntimeError, match=r"did not end .* weights of\s+its group were stepped|is open"):
            call()
    with pytest.raises(RuntimeError, match=r"did not end|second gradient"):
        model(**batches[1]).loss.backward()
    model.load_state_dict(kept)
    hift.load_state_dict(saved)
    train(model, hift, batches, 2, start=1)
    assert hift.updates == 3


def test_a_backward_that_fails_before_the_active_group_may_be_run_again() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, gradients="stepped", lr=1e-2)
    before, batch = weights(model), token_batches(1)[0]
    hook = model.model.norm.register_forward_hook(lambda module, inputs, output: _Fails.apply(output))
    with pytest.raises(RuntimeError, match="stopped here"):
        model(**batch).loss.backward()
    hook.remove()
    hift.step()
    assert hift.updates == 0 and differing(weights(model), before) == []
    model(**batch).loss.backward()
    hift.step()
    assert hift.updates == 1 and differing(weights(model), before) == ["model.embed_tokens.weight"]


def test_a_step_that_fails_in_the_backward_is_an_error_at_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hift = hift_over(
        small_decoder(), torch.optim.SGD, gradients="stepped", layers_per_group=LAYERS, state="device", lr=0.1
    )
    calls = []
    original = torch.optim.SGD.step

    def step(self: Any, closure: Any = None) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("no room")
        return original(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    with pytest.raises(MemoryError, match="no room"):
        model(**token_batches(1)[0]).loss.backward()
    with pytest.raises(RuntimeError, match=r"failed at model\.\S+ \(MemoryError\), after 3 other weights .*checkpoint"):
        hift.step()


def test_a_full_disk_is_said_before_anything_is_stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"state": "disk", "state_dir": str(tmp_path), "gradients": "stepped"}
    model, hift = hift_over(small_decoder(torch.bfloat16), torch.optim.AdamW, lr=1e-2, **config)
    expected, usual = hift_over(small_decoder(torch.bfloat16), torch.optim.AdamW, lr=1e-2)
    batches, before = token_batches(3), weights(model)
    with full_disk(monkeypatch), pytest.raises(OSError, match=re.escape(str(tmp_path))):
        model(**batches[0]).loss.backward()
    assert differing(weights(model), before) == []
    train(model, hift, batches, 3)
    train(expected, usual, batches, 3)
    assert_same_bits(model, expected)


def test_gradients_of_earlier_backwards_wait_for_a_step_that_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"gradients": "stepped", "layers_per_group": 2, "lr": 1e-2}
    runs = [hift_over(small_decoder(torch.bfloat16), torch.optim.AdamW, **settings) for _ in range(2)]
    for model, hift in runs:
        with hift.accumulating():
            for batch in token_batches(2):
                model(**batch).loss.backward()

    def fail(self: Any, **_: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(OffloadedState, "begin", fail)
        with pytest.raises(OSError, match="no space"):
            runs[0][1].step()
    for _, hift in runs:
        hift.step()
        assert hift.updates == 1
    assert_same_bits(runs[0][0], runs[1][0])


def test_a_closure_is_refused_and_a_step_without_a_backward_is_none_and_a_gradient_by_hand_an_error() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.SGD, gradients="stepped", lr=0.1)
    with pytest.raises(RuntimeError, match=r"step\(closure\).*Run the backward, then call step"):
        hift.step(lambda: 0.0)
    assert hift.step() is None and hift.updates == 0
    embedding = model.get_parameter("model.embed_tokens.weight")
    embedding.grad = torch.ones_like(embedding)
    with pytest.raises(RuntimeError, match=r"embed_tokens\.weight has a gradient that did not come from a backward"):
        hift.step()


def test_a_state_is_not_saved_between_a_backward_and_its_step() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.SGD, gradients="stepped", lr=0.1)
    model(**token_batches(1)[0]).loss.backward()
    with pytest.raises(RuntimeError, match=r"Call step\(\) before state_dict"):
        hift.state_dict()
    hift.step()
    assert hift.state_dict()["hift"]["updates"] == 1


class _SecondMoment(torch.optim.AdamW):
    """A subclass may do anything with the whole group."""


def test_an_optimizer_that_may_need_the_whole_group_is_refused() -> None:
    model = small_decoder()
    with pytest.raises(ValueError, match=r"_SecondMoment may look at the whole group\. Declare elementwise=True"):
        hift_over(model, _SecondMoment, gradients="stepped", lr=0.1)
    assert all(parameter.requires_grad for parameter in model.parameters())
    hift_over(model, _SecondMoment, gradients="stepped", elementwise=True, lr=0.1)
    with pytest.raises(ValueError, match="gradients='yes' must be one of 'device', 'host', 'stepped'"):
        HiFTConfig.paper(gradients="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "use",
    [
        lambda model, hift: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model, hift: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model, hift: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=1.0),
        lambda model, hift: hift.clip_(1e-3),
        lambda model, hift: model.get_parameter("model.embed_tokens.weight").grad.abs(),
        lambda model, hift: model.get_parameter("model.embed_tokens.weight").grad.mul_(2),
        lambda model, hift: model.get_parameter("model.embed_tokens.weight").grad.clone(),
    ],
    ids=["clip_grad_norm_", "clip_grad_value_", "another norm", "clip_", "abs", "mul_", "clone"],
)
def test_whoever_clips_or_reads_a_gradient_that_was_stepped_is_told(use: Any) -> None:
    model, hift = hift_over(small_decoder(), torch.optim.SGD, gradients="stepped", lr=0.1)
    model(**token_batches(1)[0]).loss.backward()
    with pytest.raises(RuntimeError, match=r"has stepped on this gradient in the backward .* set gradients='host'"):
        use(model, hift)
    hift.step()
    assert hift.updates == 1 and all(parameter.grad is None for parameter in model.parameters())
    model(**token_batches(1)[0]).loss.backward()
    hift.detach()
    assert all(parameter.grad is None for parameter in model.parameters())


@rotated(accumulation=[1, 2], dtype=[torch.bfloat16, torch.float32])
def test_the_norm_of_stepped_gradients_is_told_and_a_clipping_that_changes_nothing_passes(
    dtype: torch.dtype, accumulation: int
) -> None:
    norms: list[list[torch.Tensor]] = []
    for gradients in ("stepped", "device"):
        config = {"gradients": gradients, "layers_per_group": LAYERS, "stream_bytes": 8192}
        model, hift = hift_over(small_decoder(dtype), torch.optim.AdamW, lr=1e-2, **config)
        norms.append([])
        for update in range(3):
            for index, batch in enumerate(token_batches(accumulation, seed=update)):
                with hift.accumulating() if index < accumulation - 1 else nullcontext():
                    model(**batch).loss.backward()
            norms[-1].append(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
            hift.step()
    for found, expected in zip(*norms, strict=True):
        # Parts are summed up in another order: a unit in the last place of the dtype for each rounding.
        error = 4 * torch.finfo(dtype).eps * float(expected)
        assert abs(float(found) - float(expected)) <= (0 if accumulation == 1 else error) and float(expected) > 0


def test_fp16_autocast_is_refused_before_a_weight_is_changed() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.SGD, gradients="stepped", lr=0.1)
    before = weights(model)
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="fp16 autocast needs a GradScaler"):
        model(**token_batches(1)[0])
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        model(**token_batches(1)[0])
    assert differing(weights(model), before) == []
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**token_batches(1)[0]).loss
    loss.backward()
    hift.step()
    assert hift.updates == 1


def test_fp16_autocast_by_accelerate_is_refused_too() -> None:
    with one_device() as accelerator:
        model, hift = hift_over(small_decoder(), torch.optim.SGD, gradients="stepped", lr=0.1)
        prepared, _ = accelerator.prepare(model, hift)
        # As accelerate wraps it for mixed_precision="fp16", which it does not take on a CPU.
        prepared.forward = torch.autocast("cpu", torch.float16)(prepared.forward)
        with pytest.raises(RuntimeError, match="fp16 autocast needs a GradScaler"):
            prepared(**token_batches(1)[0])


def test_a_grad_scaler_is_refused() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.SGD, gradients="stepped", lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(**token_batches(1)[0]).loss).backward()
    with pytest.raises(RuntimeError, match="a GradScaler unscales gradients after the backward"):
        scaler.step(hift)
    plain, usual = hift_over(small_decoder(), torch.optim.SGD, lr=0.1)
    scaler.scale(plain(**token_batches(1)[0]).loss).backward()
    scaler.step(usual)
    assert usual.updates == 1


def test_detach_and_copies_step_nothing() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.SGD, gradients="stepped", layers_per_group=LAYERS, lr=0.1)
    before, batch = weights(model), token_batches(1)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(**batch).loss.backward()
        assert differing(weights(other), before) == []
        assert all(parameter.grad is not None for parameter in other.parameters())
        hooks = [*other._forward_hooks.values(), *other._forward_pre_hooks.values()]
        assert {getattr(hook, "function", None) for hook in hooks} == {None}, "a copy must not hold the optimizer"
    assert not hift.updates
    hift.detach()
    assert len(model._forward_hooks) + len(model._forward_pre_hooks) == 0
    model(**batch).loss.backward()
    assert differing(weights(model), before) == []


def test_accelerate_runs_it_as_any_optimizer() -> None:
    expected, usual = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    batches = token_batches(LAYERS + 1)
    train(expected, usual, batches, len(batches))
    with one_device() as accelerator:
        model, hift = hift_over(small_decoder(), torch.optim.AdamW, gradients="stepped", lr=1e-2)
        prepared, optimizer = accelerator.prepare(model, hift)
        for batch in batches:
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(model, expected)


def test_a_backward_that_ends_before_its_first_step_is_refused_or_forgotten_by_the_next() -> None:
    batch = token_batches(1)[0]
    clean, other = hift_over(small_decoder(), "AdamW", gradients="stepped")
    train(clean, other, [batch], 1)
    for is_stepped in (True, False):
        model, hift = hift_over(small_decoder(), "AdamW", gradients="stepped")
        fails = mock.patch.object(SteppedGradients, "_begin_and_step", side_effect=KeyboardInterrupt)
        with fails, pytest.raises(KeyboardInterrupt):
            model(**batch).loss.backward()
        if is_stepped:
            with pytest.raises(
                RuntimeError, match=r"did not end .*before a weight was stepped.*Load the last checkpoint"
            ):
                hift.step()
            continue
        train(model, hift, [batch], 1)
        assert_same_bits(model, clean)


@pytest.mark.parametrize("state", ["device", "host", "disk"])
def test_too_little_host_memory_for_gradients_of_earlier_forwards_is_an_error(
    state: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"state": state, **({"state_dir": tmp_path} if state == "disk" else {})}
    model, hift = hift_over(small_decoder(), "AdamW", gradients="stepped", layers_per_group=LAYERS, **settings)
    batch = token_batches(1)[0]
    train(model, hift, [batch], 1)  # its state is in its place now
    before = copy.deepcopy((weights(model), hift.state_dict()["state"]))
    room = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: room - 1)
    with (
        hift.accumulating(),
        pytest.raises(MemoryError, match=r"HiFT needs [0-9.]+ GB for gradients in .*fewer layers"),
    ):
        model(**batch).loss.backward()
    assert differing(weights(model), before[0]) == []
    hift.zero_grad()
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: 2 * room)
    with hift.accumulating():
        model(**batch).loss.backward()
    assert_same_tree(hift.state_dict()["state"], before[1])


def test_gradients_of_layers_above_that_wait_need_room_on_the_host_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"gradients": "stepped", "master": "stochastic", "inactive": "above"}
    model, hift = hift_over(small_decoder(torch.bfloat16), "AdamW", state="device", **settings)
    room = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: room - 1)
    with hift.accumulating(), pytest.raises(MemoryError, match="for gradients in host memory"):
        model(**token_batches(1)[0]).loss.backward()
