"""Optimizers that can't be rotated are refused by name when HiFT is built, and the model is left as it was."""

import re
from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from torch import nn
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from slivertune import HiFT, HiFTConfig
from tests.helpers.models import assert_same_bits, small_decoder, token_batches, trainable
from tests.helpers.reference import train
from tests.hift.cases import BIG_VOCAB, hift_over


class Lomo(torch.optim.Optimizer):
    """What matters of lomo_optim's, which is not installed here: its name."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})


class SharpnessAware(Lomo):
    """Steps twice by a closure, as SAM does, though its signature has a default."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("needs a closure")
        return closure()


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, and lets its weights go half-way."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)


class Hidden(Lomo):
    """Has a setting that no attribute of the same name tells."""

    def __init__(self, params: Any, lr: float = 0.1, *, smooth: float = 0.5) -> None:
        super().__init__(params, lr)
        self.smoothing = smooth


class Releasing(Lomo):
    def __init__(self, params: Any, lr: float = 0.1, gradient_release: bool = False) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "gradient_release": gradient_release})


def schedule_free(name: str) -> Any:
    import schedulefree

    return getattr(schedulefree, name)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        name: (lambda name=name: schedule_free(name), f"{name} can't be HiFT's base optimizer: it swaps the weights")  # type: ignore[misc]
        for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeReference")
    },
    "Lomo": (
        lambda: Lomo,
        "Lomo can't be HiFT's base optimizer: it updates weights inside backward.*gradients='stepped'",
    ),
    "LBFGS": (lambda: torch.optim.LBFGS, "LBFGS can't .*evaluates the model again inside its step.*no closure"),
    "SharpnessAware": (lambda: SharpnessAware, "SharpnessAware can't .*evaluates the model again inside its step"),
    "SparseAdam": (lambda: torch.optim.SparseAdam, r"SparseAdam can't .*sparse gradients alone.*torch\.optim\.Adam"),
    "PagedAdamW8bit": (
        lambda: bitsandbytes.optim.PagedAdamW8bit,
        "PagedAdamW8bit can't .*pages its state.*without Paged",
    ),
}


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_cannot_be_rotated_is_refused_with_the_way_out(name: str, wrap: bool) -> None:
    find, message = REFUSED[name]
    model, kind = small_decoder(), find()
    make = (
        (lambda: HiFT.wrap(kind(model.parameters(), lr=0.1), model, config=HiFTConfig.paper()))
        if wrap
        else lambda: HiFT(model, kind, config=HiFTConfig.paper(), lr=0.1)
    )
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        make()
    assert trainable(model) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: bitsandbytes.optim.AdamW(model.parameters(), is_paged=True),
            "AdamW with is_paged=True can't .*Leave is_paged out",
        ),
        (lambda model: LayerWiseDummyOptimizer({}), "LayerWiseDummyOptimizer can't .*variant without _layerwise"),
        (
            lambda model: schedule_free("ScheduleFreeWrapper")(torch.optim.SGD(model.parameters(), lr=0.1)),
            "ScheduleFreeWrapper can't .*swaps the weights",
        ),
        (
            lambda model: Lookahead(torch.optim.AdamW(model.parameters())),
            "Lookahead can't .*steps AdamW in its own way.*Give HiFT the AdamW itself",
        ),
        (
            lambda model: Hidden(model.parameters(), smooth=0.9),
            r"Hidden .* can't read smoothing=0\.9 back.*\(another one has 0\.5\)",
        ),
        (
            lambda model: Releasing(model.parameters(), gradient_release=True),
            "Releasing with gradient_release=True can't .*inside backward",
        ),
        (
            # As PEFT's LoRA-FA, which pairs matrices by their names.
            lambda model: torch.optim.SGD(
                [{"params": [*model.parameters()], "names": [name for name, _ in model.named_parameters()]}], lr=0.1
            ),
            "SGD can't .*its param groups list names per parameter",
        ),
    ],
)
def test_an_instance_that_would_be_rebuilt_otherwise_is_refused(make: Callable[[nn.Module], Any], message: str) -> None:
    model = small_decoder()
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        HiFT.wrap(make(model), model, config=HiFTConfig.paper())
    assert trainable(model) == {name for name, _ in model.named_parameters()}


def test_names_that_torch_keeps_of_parameters_are_no_reason_to_refuse() -> None:
    model, bare = small_decoder(), small_decoder()
    hift = HiFT.wrap(torch.optim.AdamW(model.named_parameters()), model, config=HiFTConfig.paper(layers_per_group=5))
    for trained, optimizer in ((model, hift), (bare, torch.optim.AdamW(bare.named_parameters()))):
        train(trained, optimizer, token_batches(2), 2)
    assert_same_bits(model, bare)


def test_what_is_no_optimizer_is_named() -> None:
    wrong: Any = object()
    with pytest.raises(TypeError, match=r"must be an instance of torch\.optim\.Optimizer"):
        HiFT.wrap(wrong, small_decoder(), config=HiFTConfig.paper())


def test_arguments_that_are_only_attributes_are_kept_when_wrapped() -> None:
    from torchao.optim import AdamW8bit

    model = small_decoder(vocab=384)
    hift = HiFT.wrap(AdamW8bit(model.parameters(), lr=1e-2, block_size=128), model, config=HiFTConfig.paper())
    with torch.compiler.set_stance("default", force_backend="eager"):
        train(model, hift, token_batches(1, vocab=384), 1)
    assert hift.state_dict()["state"]["model.embed_tokens.weight"]["exp_avg"].block_size == 128


def new_manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bitsandbytes' manager of overrides, as a new process has it."""
    monkeypatch.setattr(GlobalOptimManager, "_instance", None)
    return GlobalOptimManager.get_instance()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("by", ["module", "parameter"])
@pytest.mark.parametrize("stream_bytes", [0, 16_384])
def test_overrides_of_bitsandbytes_are_those_of_the_bare_optimizer(
    by: str, stream_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer asks for 32-bit state of embeddings; bitsandbytes knows them by parameter, and by position."""
    results = []
    for kind in ("bare", "hift"):
        manager = new_manager(monkeypatch)
        model = small_decoder(vocab=BIG_VOCAB)
        embedding: Any = model.get_submodule("model.embed_tokens")
        if by == "module":
            manager.register_module_override(embedding, "weight", {"optim_bits": 32})
        else:
            manager.override_config(embedding.weight, "optim_bits", 32)
        optimizer: Any = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2)  # type: ignore[no-untyped-call]
        if kind == "hift":
            optimizer = HiFT.wrap(
                optimizer, model, config=HiFTConfig.paper(layers_per_group=5, stream_bytes=stream_bytes)
            )
        train(model, optimizer, token_batches(4, vocab=BIG_VOCAB), 4)
        if kind == "hift":
            state = optimizer.state_dict()["state"]
            assert state["model.embed_tokens.weight"]["state1"].dtype == torch.float32
            assert state["lm_head.weight"]["state1"].dtype == torch.uint8
            optimizer.load_state_dict(optimizer.state_dict())
        results.append(model)
    assert_same_bits(*results)


def test_an_override_of_one_group_does_not_reach_the_first_tensor_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model, manager = small_decoder(vocab=BIG_VOCAB), new_manager(monkeypatch)
    manager.register_module_override(model.get_submodule("model.embed_tokens"), "weight", {"optim_bits": 32})
    layers = [["model.embed_tokens"], ["lm_head"], ["model.layers", "model.norm"]]
    _, hift = hift_over(model, "AdamW8bit", layers=layers, stream_bytes=0)
    train(model, hift, token_batches(2, vocab=BIG_VOCAB), 2)
    assert hift.state_dict()["state"]["lm_head.weight"]["state1"].dtype == torch.uint8
