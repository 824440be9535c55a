"""Gradients that wait on the host, or are stepped in an update's last backward: the same bits, and nothing silent.

Together with other settings they stand in test_pairwise.py; combinations that are listed here are slow.
"""

import copy
import gc
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import HiFT, HiFTConfig, Ledger, TokenTune
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.copy_streams import CopyStreams, Direction, Event
from slivertune.hift import host_room
from slivertune.hift.host_gradients import GradientMemory, OffloadedGradient
from tests.helpers.accelerator import one_device
from tests.helpers.models import (
    LAYERS,
    assert_same_bits,
    differing,
    small_decoder,
    tiny_gpt2,
    tiny_llama,
    token_batches,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.ranks import quick
from tests.hift.cases import BIG_VOCAB, OPTIMIZERS, hift_over, run

STREAM_BYTES = 20_000
PLACES = ("host", "stepped")
UPDATES = LAYERS + 2
"""First turns, which create state, and two with state that has waited."""


def trained(model: nn.Module, name: str, *, accumulation: int = 1, clip: float | None = None, **config: Any) -> Any:
    other, hift = hift_over(twin(model), name, **{"stream_bytes": STREAM_BYTES, **config})
    updates = hift.num_groups + 2
    run(other, hift, updates, accumulation=accumulation, clip=clip, hift=hift)
    assert hift.updates == updates
    return other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_on_the_device_steps_what_earlier_backwards_left_on_the_host(dtype: torch.dtype) -> None:
    model = small_decoder(dtype)
    expected = trained(model, "AdamW", accumulation=3, layers_per_group=2)
    assert_same_bits(
        trained(model, "AdamW", accumulation=3, layers_per_group=2, gradients="stepped", state="device"), expected
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_accumulation_that_was_stepped_leaves_no_gradient_on_the_device(dtype: torch.dtype) -> None:
    model, hift = hift_over(
        small_decoder(dtype, vocab=4001),
        "AdamW",
        gradients="stepped",
        layers_per_group=LAYERS,
        stream_bytes=2**18,
    )
    batches = token_batches(3, vocab=4001)
    run(model, hift, 1)
    with Ledger(model) as ledger:
        for batch in batches[:2]:
            with hift.accumulating():
                model(**batch).loss.backward()
        model(**batches[2]).loss.backward()
        census = ledger.current()
        # Beside the pieces: step counts, and what a scalar takes.
        assert (census.gradients, census.residual < 10_000) == (0, True), census
        hift.step()
    assert hift.updates == 2


@pytest.mark.parametrize("prefetch_bytes", [pytest.param(0, marks=pytest.mark.slow), 60_000])
@pytest.mark.parametrize(
    ("name", "accumulation", "clip"),
    quick([("SGD momentum", 4, 0.1), ("AdamW8bit", 1, 0.1), ("AdamW", 4, 0.1)], [("SGD momentum", 4, 0.1)]),
)
def test_clipped_gradients_on_the_host_are_those_of_the_device(
    name: str, accumulation: int, clip: float, prefetch_bytes: int
) -> None:
    model = small_decoder(torch.bfloat16, vocab=BIG_VOCAB)
    expected = trained(model, name, accumulation=accumulation, clip=clip)
    found = trained(model, name, accumulation=accumulation, clip=clip, gradients="host", prefetch_bytes=prefetch_bytes)
    assert_same_bits(found, expected)
    unclipped = trained(model, name, accumulation=accumulation)
    assert differing(weights(unclipped), weights(expected)), "the clipping must bite, or this compares nothing"


@rotated(name=[name for name in OPTIMIZERS if "transformers" not in name and "own" not in name], gradients=PLACES)
def test_every_optimizer_gets_the_same_gradients(name: str, gradients: str) -> None:
    model = small_decoder(torch.bfloat16, vocab=BIG_VOCAB)
    common = {"layers_per_group": 2, "accumulation": 2}
    assert_same_bits(trained(model, name, gradients=gradients, **common), trained(model, name, **common))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_all_layers_with_gradients_on_the_host_are_the_bare_optimizer(accumulation: int) -> None:
    model = small_decoder(torch.float32, vocab=BIG_VOCAB)
    bare, other = twin(model), twin(model)
    optimizer_class, options = OPTIMIZERS["AdamW"]
    run(bare, optimizer_class(bare.parameters(), **options), 5, accumulation=accumulation, clip=0.5)
    config = HiFTConfig.paper(
        layers_per_group=LAYERS, gradients="host", stream_bytes=STREAM_BYTES, prefetch_bytes=30_000
    )
    hift = HiFT(other, optimizer_class, config=config, **options)
    run(other, hift, 5, accumulation=accumulation, clip=0.5)
    assert_same_bits(other, bare)


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_clipping_inside_the_step_is_clipping_before_it_and_reports_the_norm(gradients: Any) -> None:
    model = small_decoder(torch.bfloat16)
    expected, found = twin(model), twin(model)
    _, usual = hift_over(expected, torch.optim.AdamW, lr=1e-2)
    _, clipping = hift_over(found, torch.optim.AdamW, lr=1e-2, gradients=gradients, max_grad_norm=0.1)
    for batch in token_batches(UPDATES):
        expected(**batch).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        usual.step()
        found(**batch).loss.backward()
        clipping.step()
        assert clipping.grad_norm is not None and torch.equal(clipping.grad_norm, norm) and norm > 0.1
    assert_same_bits(found, expected)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any] | None]] = {
    "tied": (lambda: tiny_llama(torch.bfloat16, tied=True), {"layers_per_group": LAYERS}, None),
    "tied gpt2": (lambda: tiny_gpt2(torch.bfloat16), {}, None),
    "checkpointed": (lambda: tiny_llama(torch.bfloat16), {"layers_per_group": 2}, {"use_reentrant": False}),
    "reentrant": (lambda: tiny_llama(torch.bfloat16), {"layers_per_group": 2}, {"use_reentrant": True}),
}


@rotated(name=CASES, gradients=PLACES)
def test_tied_weights_and_checkpointing(name: str, gradients: str) -> None:
    make, config, checkpointing = CASES[name]
    model = make()
    if checkpointing is not None:
        enable_checkpointing(model, checkpointing)
    common = {"accumulation": 2, **config}
    assert_same_bits(trained(model, "AdamW", gradients=gradients, **common), trained(model, "AdamW", **common))


@pytest.mark.parametrize("gradients", ["host", "stepped"])
def test_with_token_selection(gradients: str) -> None:
    model, made = tiny_llama(torch.bfloat16), []
    for place in ("device", gradients):
        other = twin(model)
        with TokenTune(ratio=0.5, seed=1).attach(other):
            _, hift = hift_over(other, "AdamW", gradients=place, stream_bytes=STREAM_BYTES)
            run(other, hift, UPDATES, accumulation=2, hift=hift)
        made.append(other)
    assert_same_bits(*made)


@rotated(gradients=PLACES, accumulation=[1, 4])
def test_a_run_resumes_after_every_step(gradients: str, accumulation: int) -> None:
    config = {"gradients": gradients, "stream_bytes": STREAM_BYTES, "prefetch_bytes": 40_000}
    made = small_decoder(torch.bfloat16)
    whole, usual = hift_over(twin(made), "AdamW")
    run(whole, usual, UPDATES, accumulation=accumulation)
    model, hift = hift_over(made, "AdamW", **config)
    for update in range(UPDATES):
        run(model, hift, 1, accumulation=accumulation, start=update, hift=hift)
        saved = copy.deepcopy(hift.state_dict())
        values = copy.deepcopy(model.state_dict())
        model = small_decoder(torch.bfloat16, seed=5)
        model.load_state_dict(values)
        _, hift = hift_over(model, "AdamW", **config)
        hift.load_state_dict(saved)
    assert_same_bits(model, whole)


class NotedStreams(CopyStreams):
    """Copies with ends, for which the computation waits."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.waits = 0

    def record(self, direction: Direction | None = None) -> Event:
        return object()

    def compute_after(self, event: Event) -> None:
        self.waits += 1


def test_a_small_gradient_does_not_wait_for_a_large_one_that_leaves() -> None:
    large, small, medium = (nn.Parameter(torch.zeros(count)) for count in (1000, 2, 20))
    weights: Any = [SimpleNamespace(parameter=each) for each in (large, small, medium)]
    streams = NotedStreams(torch.device("cpu"))
    gradients = GradientMemory(streams, in_flight_bytes=80, num_bytes=2**14)
    gradients.begin_turn(weights)
    waits = []
    for parameter in (large, small, medium):
        parameter.grad = torch.ones_like(parameter)
        gradients.take(parameter)
        waits.append(streams.waits)
    # Beside the large one 8 bytes are on their way, and then 88.
    assert waits == [0, 0, 1]
    # Each with its norm, which the stream writes.
    assert sum(gradient.nbytes for _, (gradient, _) in gradients._leaving) == 88


@pytest.mark.parametrize(
    "checkpointing", quick([None, True, False], [True]), ids=["all kept", "reentrant", "not reentrant"]
)
def test_the_device_holds_as_much_for_all_layers_as_for_one(checkpointing: bool | None) -> None:
    found = {}
    for layers_per_group in (1, LAYERS):
        model = tiny_llama(torch.bfloat16, vocab=4001)
        if checkpointing is not None:
            enable_checkpointing(model, {"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        model, hift = hift_over(model, "AdamW", gradients="host", stream_bytes=2**18, layers_per_group=layers_per_group)
        with Ledger(model) as ledger:
            run(model, hift, hift.num_groups, accumulation=2)
            hift.step()
            ledger.reset_peak()
            run(model, hift, hift.num_groups, accumulation=2, start=20)
            highest = ledger.highest
        # The largest gradient, the sum it is added to, and the engine's next one.
        largest = max(parameter.nbytes for parameter in model.parameters())
        assert highest.gradients <= 3 * largest
        found[layers_per_group] = highest
        assert highest.host >= 12 * sum(p.numel() for p in model.parameters())
    one, every = found[1], found[LAYERS]
    total = [census.parameters + census.gradients + census.state for census in (one, every)]
    assert total[1] <= 1.02 * total[0]


def in_update(**config: Any) -> tuple[Any, HiFT, Any]:
    """A model between backward and step, with gradients on the host, and its twin with gradients that stay."""
    made = []
    for place in ("host", "device"):
        model, hift = hift_over(
            small_decoder(torch.bfloat16), "AdamW", gradients=place, layers_per_group=LAYERS, **config
        )
        run(model, hift, 2)
        model(**token_batches(3)[2]).loss.backward()
        made.append((model, hift))
    return made[0][0], made[0][1], made[1][0]


def test_what_a_script_reads_of_a_gradient_is_true() -> None:
    model, _, usual = in_update()
    for name, parameter in model.named_parameters():
        expected = usual.get_parameter(name).grad
        gradient = parameter.grad
        assert isinstance(gradient, OffloadedGradient) and expected is not None
        assert (gradient.shape, gradient.dtype, gradient.device) == (expected.shape, expected.dtype, expected.device)
        for read in (
            torch.clone,
            lambda g: g.norm(),
            lambda g: torch.linalg.vector_norm(g, 1.0),
            lambda g: torch.linalg.vector_norm(g, float("inf")),
            lambda g: g.float().square().sum(),
            lambda g: g.isfinite().all(),
            lambda g: torch.histc(g.float(), 10),
            lambda g: g.data.norm(),
            lambda g: g.detach().cpu().float().sum(),
            copy.deepcopy,
            lambda g: pickle.loads(pickle.dumps(g)),
        ):
            assert torch.equal(read(gradient), read(expected))


WRITES: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda g: g.mul_(0.5),
    "divided": lambda g: g.div_(3),
    "scaled by a tensor": lambda g: g.mul_(torch.tensor(0.25)),
    "scaled twice": lambda g: g.mul_(0.5).mul_(torch.tensor(3.0)),
    "noise": lambda g: g.add_(torch.ones_like(g), alpha=0.01),
    "scaled, then added to": lambda g: g.mul_(0.5).add_(torch.ones_like(g)),
    "clamped": lambda g: g.clamp_(-1e-3, 1e-3),
    "clamped, then scaled": lambda g: g.clamp_(-1e-3, 1e-3).mul_(0.5),
    "scaled by its data": lambda g: g.data.mul_(0.5),
    "zeroed": lambda g: g.zero_(),
    "replaced": lambda g: g.copy_(torch.ones_like(g)),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_what_a_script_writes_into_a_gradient_is_stepped(write: str) -> None:
    made = []
    for place in ("host", "device"):
        model, hift = hift_over(small_decoder(torch.bfloat16), "AdamW", gradients=place, layers_per_group=LAYERS)
        run(model, hift, 1)
        for index in (1, 2):
            model(**token_batches(3)[index]).loss.backward()
            for parameter in model.parameters():
                WRITES[write](parameter.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        hift.step()
        made.append(model)
    assert_same_bits(*made)


def test_zeroed_and_dropped_gradients_are_those_of_the_next_backward() -> None:
    made = []
    for place in ("host", "device"):
        model, hift = hift_over(small_decoder(torch.bfloat16), "AdamW", gradients=place)
        batches = token_batches(12)
        for index in range(0, 12, 3):
            model(**batches[index]).loss.backward()
            owner, to_none = ((hift, True), (model, True), (hift, False))[index // 3 % 3]
            owner.zero_grad(set_to_none=to_none)
            model(**batches[index + 1]).loss.backward()
            if index == 9:
                model.get_parameter("model.embed_tokens.weight").grad = None
            hift.step()
        made.append(model)
    assert_same_bits(*made)


def test_a_backward_that_fails_leaves_what_it_leaves_on_the_device() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    made = []
    for place in ("host", "device"):
        model, hift = hift_over(small_decoder(torch.bfloat16), "AdamW", gradients=place, layers_per_group=LAYERS)
        batches = token_batches(3)
        hook = model.model.layers[1].register_forward_hook(lambda module, inputs, output: Fails.apply(output))
        with pytest.raises(KeyboardInterrupt):
            model(**batches[0]).loss.backward()
        hook.remove()
        model(**batches[1]).loss.backward()  # adds to what is there
        hift.step()
        run(model, hift, 1, start=2)
        made.append(model)
    assert_same_bits(*made)


def test_a_state_loaded_between_backward_and_step_keeps_the_gradients() -> None:
    made = []
    for place in ("host", "device"):
        model, hift = hift_over(small_decoder(torch.bfloat16), "AdamW", gradients=place, layers_per_group=2)
        run(model, hift, 4)
        saved = copy.deepcopy(hift.state_dict())
        model(**token_batches(5)[4]).loss.backward()
        hift.load_state_dict(saved)
        hift.step()
        run(model, hift, 3, start=5)
        made.append(model)
    assert_same_bits(*made)


@pytest.mark.parametrize(
    "use",
    [
        lambda g: g.view(-1),
        lambda g: g[0],
        lambda g: torch._foreach_abs([g]),
        lambda g: torch._foreach_add_([g], 1.0),
    ],
)
def test_views_and_operators_on_many_gradients_are_refused(use: Any) -> None:
    model, _, _ = in_update()
    with pytest.raises(RuntimeError, match=r"on a gradient in host memory .*parameter\.grad\.clone\(\)"):
        use(model.get_parameter("lm_head.weight").grad)


def test_a_gradient_that_was_kept_past_its_step_is_an_error_and_not_the_next_one() -> None:
    model, hift, _ = in_update()
    kept = model.get_parameter("lm_head.weight").grad
    hift.step()
    model(**token_batches(1)[0]).loss.backward()
    with pytest.raises(RuntimeError, match="belongs to a finished update"):
        kept.norm()


def test_a_grad_scaler_a_sparse_gradient_and_wrong_settings_are_refused() -> None:
    _, hift, _ = in_update()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"GradScaler unscales .* gradients='host' keeps them in host memory"):
        scaler.step(hift)
    sparse = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    config = HiFTConfig.paper(gradients="host", layers=[["0"], ["1"]])
    embedding = HiFT(sparse, torch.optim.SGD, config=config, lr=0.1)
    with pytest.raises(ValueError, match="sparse gradient can't be offloaded"):
        sparse(torch.tensor([1, 2])).sum().backward()
    assert embedding.active_group == 0
    for config_, match in (
        ({"gradients": "host", "state": "device"}, 'state="device" does not move'),
        ({"gradients": "stepped", "max_grad_norm": 1.0}, r'Use gradients="host"'),
        ({"max_grad_norm": 0}, "max_grad_norm=0 must be a number over 0"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1' must be a number"),
        ({"gradients": "disk"}, "gradients='disk' must be one of"),
    ):
        with pytest.raises(ValueError, match=match):
            HiFTConfig.paper(**config_)


def test_stepped_gradients_that_nobody_said_to_accumulate_are_an_error_that_says_how() -> None:
    model, hift = hift_over(small_decoder(), "AdamW", gradients="stepped")
    assert not hift.updates
    model(**token_batches(1)[0]).loss.backward()
    with pytest.raises(RuntimeError, match=r"with optimizer\.accumulating\(\)"):
        model(**token_batches(1)[0]).loss.backward()


def test_stepped_weights_that_only_earlier_backwards_reached_are_stepped_too() -> None:
    made = []
    for place in ("stepped", "device"):
        model, hift = hift_over(small_decoder(torch.bfloat16), "AdamW", gradients=place, layers_per_group=LAYERS)
        for batch in token_batches(4):
            with hift.accumulating():
                model(**batch).loss.backward()
            model.model.embed_tokens(batch["input_ids"]).square().sum().backward()
            hift.step()
        with hift.accumulating():
            model(**batch).loss.backward()
        hift.step()
        assert hift.updates == 5
        made.append(model)
    assert_same_bits(*made)


@pytest.mark.parametrize("gradients", ["host", "stepped"])
def test_accelerate_accumulates_and_clips(gradients: str) -> None:
    made, norms = [], []
    for place in (gradients, "device"):
        with one_device(gradient_accumulation_steps=2) as accelerator:
            model, hift = hift_over(small_decoder(torch.bfloat16), "AdamW", gradients=place)
            prepared, optimizer = accelerator.prepare(model, hift)
            for batch in token_batches(2 * UPDATES):
                with accelerator.accumulate(prepared):
                    accelerator.backward(prepared(**batch).loss)
                    if accelerator.sync_gradients and gradients == "host":
                        norms.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.3))
                    optimizer.step()
                    optimizer.zero_grad()
            assert hift.updates == UPDATES
        made.append(model)
    assert_same_bits(*made)
    assert norms[: len(norms) // 2] == norms[len(norms) // 2 :]


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_too_little_host_memory_is_said_before_anything_is_allocated(
    gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hift = hift_over(small_decoder(torch.bfloat16), "AdamW", gradients=gradients, layers_per_group=LAYERS)
    num_parameters, before = sum(p.numel() for p in model.parameters()), weights(model)
    needed = num_parameters * (12 if gradients == "device" else 14)
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: needed - 1)

    def update() -> None:
        model(**token_batches(1)[0]).loss.backward()
        hift.step()

    with Ledger() as ledger:
        for _ in range(2):
            with pytest.raises(MemoryError, match=r"GB for masters and state .* are free .*state=\"disk\""):
                update()
        assert ledger.highest.host == 0 and differing(weights(model), before) == []
        # One check, before the gradients take their part.
        free = iter([2 * needed])
        monkeypatch.setattr(host_room, "available_host_bytes", lambda: next(free))
        hift.zero_grad()
        run(model, hift, 2)
    assert hift.updates == 2


@pytest.mark.parametrize(("gradients", "needs_them"), [("device", False), ("host", True), ("stepped", False)])
def test_masters_that_are_made_at_once_are_refused_together_with_the_gradients_to_come(
    gradients: Any, needs_them: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: 1)
    with pytest.raises(MemoryError, match="GB for masters and state") as caught:
        hift_over(small_decoder(torch.bfloat16), "AdamW", gradients=gradients, waiting="int8")
    assert ("GB for gradients" in str(caught.value)) is needs_them


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_state_that_was_loaded_lies_on_the_host_already_and_needs_no_more_of_it(
    gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, saving = hift_over(small_decoder(torch.bfloat16), "AdamW", gradients=gradients)
    run(model, saving, LAYERS)
    other, loading = hift_over(twin(model), "AdamW", gradients=gradients)
    loading.load_state_dict(copy.deepcopy(saving.state_dict()))
    largest = max(sum(weight.parameter.nbytes for weight in saving.weights_of(group)) for group in range(LAYERS))
    # Room for the gradients, with the gaps between them, and for nothing else.
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: 2 * largest if gradients == "host" else 0)
    run(other, loading, 2, start=LAYERS)
    run(model, saving, 2, start=LAYERS)
    assert_same_bits(other, model)


@pytest.mark.parametrize("gradients", ["device", "host", "stepped"])
def test_an_output_that_outlives_the_optimizer_keeps_none_of_its_state(gradients: Any) -> None:
    with Ledger() as ledger:
        model, hift = hift_over(small_decoder(torch.bfloat16), "AdamW", gradients=gradients)
        run(model, hift, LAYERS)
        loss = model(**token_batches(1)[0]).loss
        assert ledger.current().host > 0
        del hift
        assert ledger.current().host == 0
    loss.backward()


def test_dropping_the_optimizer_frees_its_host_memory() -> None:
    with Ledger() as ledger:
        model, hift, _ = in_update()
        assert ledger.current().host > 0
        del hift, _
        model.zero_grad()
        gc.collect()
        assert ledger.current().host == 0
