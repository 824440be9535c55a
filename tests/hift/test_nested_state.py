"""State that is no plain tensor: subclasses, containers, objects. It streams like any other, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import HiFT, HiFTConfig
from slivertune.core.ledger import Ledger
from slivertune.hift.nested_state import flatten_state, unflatten_state
from slivertune.parallel.checkpoint.sidecar import load_state, save_state
from tests.helpers.compilation import IGNORED
from tests.helpers.models import (
    assert_all_moved,
    assert_same_bits,
    small_decoder,
    token_batches,
    trainable,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.ranks import quick
from tests.helpers.reference import train
from tests.hift.cases import hift_over, reloaded, with_reference

FP32, BF16 = torch.float32, torch.bfloat16
VOCAB = 384
"""384 x 32 elements in embedding and head: more than 4,096, and whole blocks of 256, so that torchao quantises."""
BATCHES = token_batches(12, vocab=VOCAB)


# torch's compiler is to blame, on its first import and in what it traces.
pytestmark = IGNORED


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    """torchao compiles its step for every shape: traced whole, and run as it is, which inductor takes minutes for."""
    torch._dynamo.reset()
    with torch.compiler.set_stance("default", force_backend="eager"):
        yield


class Projector:
    """As GaLore's: an object that holds a tensor, made of the first gradient."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.matrix: torch.Tensor | None = None

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.matrix is None:
            self.matrix = torch.sign(gradient) * self.scale
        return gradient * self.matrix


class TensorWithNote(torch.Tensor):
    """A subclass with memory and an attribute of its own."""

    note: str


class NestedSGD(torch.optim.Optimizer):
    """Keeps tensors in lists, dictionaries, objects and a subclass, beside None, a string and a growing history."""

    def __init__(self, params: Any, lr: float = 0.1, history: int = 3) -> None:
        super().__init__(params, {"lr": lr, "history": history})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            noted = torch.zeros_like(gradient).as_subclass(TensorWithNote)
            noted.note = "kept"
            state.update(
                old=[], nested={"mean": torch.zeros_like(gradient), "pair": (torch.zeros(()), "word")}, nothing=None
            )
            state.update(word="plain", projector=Projector(0.5), noted=noted)
        assert state["nothing"] is None and state["word"] == "plain" and state["noted"].note == "kept"
        assert type(state["noted"]) is TensorWithNote
        state["old"] = [*state["old"], gradient.clone()][-group["history"] :]
        state["nested"]["mean"].lerp_(gradient, 0.3)
        state["nested"]["pair"][0].add_(1)
        state["noted"].mul_(0.5).add_(gradient)
        total = sum(state["old"]) + state["nested"]["mean"] + state["noted"].as_subclass(torch.Tensor)
        parameter.add_(state["projector"](total) / state["nested"]["pair"][0], alpha=-group["lr"])


def torchao(name: str) -> Any:
    import torchao.optim

    return getattr(torchao.optim, name)


CASES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    **{
        name: lambda name=name: (torchao(name), {"lr": 1e-2, "weight_decay": 0.1})  # type: ignore[misc]
        for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")
    },
    "nested": lambda: (NestedSGD, {"lr": 0.02}),
}
PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "small pieces": {"stream_bytes": 16_384},
    "device": {"state": "device"},
    "disk": {"state": "disk"},
}


def placed(place: str, folder: Path) -> dict[str, Any]:
    return {**PLACES[place], **({"state_dir": str(folder)} if place == "disk" else {})}


@rotated(name=CASES, place=PLACES)
def test_with_one_group_it_is_the_bare_optimizer(name: str, place: str, tmp_path: Path) -> None:
    optimizer_class, options = CASES[name]()
    dense = small_decoder(vocab=VOCAB)
    before = weights(dense)
    bare = optimizer_class(dense.parameters(), **options)
    model, hift = hift_over(twin(dense), optimizer_class, layers_per_group=5, **placed(place, tmp_path), **options)
    train(dense, bare, BATCHES, 4)
    train(model, hift, BATCHES, 4)
    assert_all_moved(dense, before)
    assert_same_bits(model, dense)
    if name != "nested":
        kinds = {type(state["exp_avg"]).__name__ for state in bare.state.values()}
        assert kinds == {"Tensor", f"OptimState{name.removeprefix('AdamW')}"}


@rotated(name=CASES, dtype=[FP32, BF16])
def test_rotated_groups_are_optimizers_rotated_by_hand(name: str, dtype: torch.dtype) -> None:
    optimizer_class, options = CASES[name]()
    model, hift, dense, naive = with_reference(
        small_decoder(dtype, vocab=VOCAB), optimizer_class, layers_per_group=2, **options
    )
    train(dense, naive, BATCHES, 8)
    train(model, hift, BATCHES, 8)
    assert_same_bits(model, dense)


@rotated(place=PLACES, name=[*CASES][::-1])
def test_it_resumes_with_the_same_bits(name: str, place: str, tmp_path: Path) -> None:
    optimizer_class, options = CASES[name]()

    def build(folder: str, seed: int = 0) -> tuple[nn.Module, HiFT]:
        where = placed(place, tmp_path / folder)
        return hift_over(
            small_decoder(BF16, vocab=VOCAB, seed=seed), optimizer_class, layers_per_group=2, **where, **options
        )

    whole_model, whole = build("whole")
    train(whole_model, whole, BATCHES, 5)
    # Objects of a class of ours are no plain containers; torchao's tensors are, to torch.
    saved = reloaded([whole_model.state_dict(), whole.state_dict()], weights_only=name != "nested")
    train(whole_model, whole, BATCHES, 5, start=5)
    # Twice: what was loaded from is not what is trained on.
    for folder, seed in (("again", 9), ("third", 8)):
        run = build(folder, seed)
        for part, state in zip(run, saved, strict=True):
            part.load_state_dict(state)
        train(*run, BATCHES, 5, start=5)
        assert_same_bits(run[0], whole_model)


@pytest.mark.parametrize("name", quick(["AdamW8bit", "AdamW4bit", "AdamWFp8"], ["AdamW4bit"]))
def test_it_travels_in_the_folder_beside_a_checkpoint(name: str, tmp_path: Path) -> None:
    optimizer_class, options = CASES[name]()
    runs = [hift_over(small_decoder(BF16, vocab=VOCAB, seed=seed), optimizer_class, **options) for seed in (0, 9)]
    (model, first), (other, second) = runs
    train(model, first, BATCHES, 7)
    save_state(first, tmp_path / "hift")
    other.load_state_dict(model.state_dict())
    load_state(second, tmp_path / "hift")
    for run in runs:
        train(*run, BATCHES, 5, start=7)
    assert_same_bits(model, other)


def test_objects_that_could_not_be_loaded_again_are_named_when_saved(tmp_path: Path) -> None:
    model, hift = hift_over(small_decoder(vocab=VOCAB), NestedSGD, lr=0.02)
    train(model, hift, BATCHES[:1], 1)
    with pytest.raises(ValueError, match=r"objects of .*Projector.*add_safe_globals"):
        save_state(hift, tmp_path / "hift")
    assert not (tmp_path / "hift").exists()


@pytest.mark.parametrize("name", quick(CASES, ["AdamW4bit", "nested"]))
def test_it_waits_off_the_device(name: str) -> None:
    optimizer_class, options = CASES[name]()
    model, hift = hift_over(small_decoder(vocab=VOCAB), optimizer_class, **options)
    with Ledger(model) as ledger:
        for index in range(7):
            train(model, hift, BATCHES, 1, start=index)
            census = ledger.current()
            assert (census.state, census.gradients) == (0, 0)
            # The learning rate, which torchao keeps as a tensor in each instance.
            assert census.residual <= 4 * min(index + 1, hift.num_groups)
        assert census.host > 0


def test_a_number_for_a_learning_rate_that_the_class_keeps_as_a_tensor_is_followed() -> None:
    dense = small_decoder(vocab=VOCAB)
    bare = torchao("AdamW8bit")(dense.parameters(), lr=1e-2)
    model, hift = hift_over(twin(dense), torchao("AdamW8bit"), layers_per_group=5, lr=1e-2)
    for index, rate in enumerate((1e-2, 5e-3, 0.0, 1e-3)):
        bare.param_groups[0]["lr"].fill_(rate)
        hift.param_groups[0]["lr"] = rate
        train(dense, bare, BATCHES, 1, start=index)
        train(model, hift, BATCHES, 1, start=index)
    assert_same_bits(model, dense)


def test_random_numbers_drawn_in_the_step_are_those_of_the_bare_optimizer() -> None:
    options = {"lr": 1e-2, "bf16_stochastic_round": True}
    models = [small_decoder(BF16, vocab=VOCAB) for _ in range(2)]
    bare, to_wrap = (torchao("AdamW8bit")(model.parameters(), **options) for model in models)
    wrapped = HiFT.wrap(to_wrap, models[1], config=HiFTConfig.paper(layers_per_group=5, master="none"))
    for model, optimizer in zip(models, (bare, wrapped), strict=True):
        torch.manual_seed(0)
        train(model, optimizer, BATCHES, 3)
    assert_same_bits(*models)


def test_taking_apart_and_putting_together_changes_nothing_but_the_tensors() -> None:
    state = {
        "plain": torch.ones(3),
        "list": [torch.zeros(2), None, {"deep": (torch.ones(1), 4)}],
        "none": None,
        "words": ["a", "b"],
    }
    flat = flatten_state(state)
    assert flat["plain"] is state["plain"] and flat["words"] is state["words"]
    assert {key for key, value in flat.items() if isinstance(value, torch.Tensor)} == {
        "plain",
        "list/0",
        "list/2/deep/0",
    }
    whole = unflatten_state(
        {key: value + 1 if isinstance(value, torch.Tensor) else value for key, value in flat.items()}
    )
    assert whole.keys() == state.keys()
    assert whole["list"][0].tolist() == [1, 1] and whole["list"][1] is None
    assert whole["list"][2]["deep"][0].tolist() == [2] and whole["list"][2]["deep"][1] == 4


def test_a_distributed_tensor_is_taken_apart_and_its_mesh_left_alone(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        value = DTensor.from_local(torch.arange(6.0).view(2, 3), mesh, [Replicate()])
        flat = flatten_state({"moment": value})
        assert type(flat["moment/_local_tensor"]) is torch.Tensor
        again = unflatten_state({key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in flat.items()})
        assert isinstance(again["moment"], DTensor) and again["moment"].device_mesh is mesh
        assert torch.equal(again["moment"].to_local(), value.to_local())
    finally:
        dist.destroy_process_group()


class SparseState(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = parameter.grad.to_sparse()


class Opaque(torch.Tensor):
    """A wrapper that does not say what it consists of."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    inner: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


class OpaqueState(SparseState):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = Opaque(torch.zeros(3))


@pytest.mark.parametrize(
    ("optimizer_class", "config", "message"),
    [
        (SparseState, {}, r"SparseState.*'moment' is a tensor of layout torch.sparse_coo, which can't be moved"),
        (OpaqueState, {}, r"OpaqueState.*'moment' is a Opaque, a tensor subclass without __tensor_flatten__"),
        ("AdamW8bit", {"elementwise": True}, "AdamW8bit does not support elementwise=True.*Leave elementwise out"),
    ],
)
@pytest.mark.parametrize("wrap", [False, True])
def test_state_that_cannot_be_moved_is_refused_when_built(
    optimizer_class: Any, config: dict[str, Any], message: str, wrap: bool
) -> None:
    kind = torchao(optimizer_class) if isinstance(optimizer_class, str) else optimizer_class
    model, random = small_decoder(vocab=VOCAB), torch.get_rng_state()
    to_wrap = kind(model.parameters(), lr=1e-2)
    wrapped = partial(HiFT.wrap, to_wrap, model, config=HiFTConfig.paper(**config))
    build = wrapped if wrap else partial(hift_over, model, kind, lr=1e-2, **config)
    with pytest.raises(ValueError, match=message):
        build()
    assert trainable(model) == {name for name, _ in model.named_parameters()}
    assert torch.equal(torch.get_rng_state(), random)
