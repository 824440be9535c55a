"""HiFT under FSDP2: weights with fewer rows than ranks, what is refused, and errors of a model's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from slivertune import HiFT, HiFTConfig, Ledger
from tests.helpers.models import differing, tiny_bert, weights
from tests.helpers.ranks import run_ranks
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import load, message_of, refusal_of, running, save
from tests.parallel.reference import OneProcess, whole_weights


class Narrow(nn.Module):
    """Weights with fewer rows than ranks: some ranks hold nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 1)
        self.last = nn.Linear(1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        x = x.to(self.last.weight.dtype)
        return CausalLMOutput(loss=self.last(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean())


class NarrowCase(HiFTCase):
    """Nine updates in one unit of FSDP2."""

    def build_model(self, seed: int = 3) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Narrow().to(self.dtype)

    def batch(self, update: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * update + rank))}


LAYERS = [["first"], ["second"], ["last"]]
NARROW = NarrowCase(updates=9, plugin={"auto_wrap_policy": "no_wrap"}, settings={"layers": LAYERS})
CASES = {
    "in whole groups": replace(NARROW, settings={"layers": LAYERS, "stream_bytes": 0}),
    "in pieces": replace(NARROW, settings={"layers": LAYERS, "stream_bytes": 2**20}),
    "bf16": replace(NARROW, dtype=torch.bfloat16, settings={"layers": LAYERS, "stream_bytes": 2**20}),
}


def train_narrow(rank: int, num_ranks: int, name: str, folder: Path) -> dict[str, Any]:
    """A run that is saved on its way, and one that goes on from there."""
    case = CASES[name]
    with running(case, "fsdp2", rank, seed=3) as run:
        run.train(0, 4)
        save(run, folder)
        run.train(4, case.updates)
        straight = whole_weights(run.model)
        trained = [weight.parameter for index in range(len(LAYERS)) for weight in run.sliver.weights_of(index)]
    with running(case, "fsdp2", rank, seed=8) as run:
        load(run, folder)
        resumed = whole_weights(run.train(4, case.updates).model)
    return {"straight": straight, "resumed": resumed, "empty": sum(each.numel() == 0 for each in trained)}


class OtherCase(HiFTCase):
    """An optimizer that FSDP2 may not go with, over a Llama or another model."""

    def build_model(self, seed: int = 0) -> nn.Module:
        if self.settings.get("layers"):
            return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        return tiny_bert() if self.plugin else super().build_model(seed)

    def build_optimizer(self, model: nn.Module, **changes: Any) -> HiFT:
        settings = dict(self.settings)
        return HiFT.wrap(settings.pop("base")(model.parameters(), lr=1e-2), model, config=HiFTConfig.paper(**settings))


UNKNOWN = type("Unknown", (torch.optim.AdamW,), {})
OTHERS: dict[str, OtherCase] = {
    "Adafactor": OtherCase(settings={"base": torch.optim.Adafactor}),
    "Unknown": OtherCase(settings={"base": UNKNOWN}),
    "declared": OtherCase(settings={"base": UNKNOWN, "elementwise": True}),
    "Muon": OtherCase(settings={"base": torch.optim.Muon, "layers": [["0"], ["1"]]}),
    **{
        f"blocks {blocks}": OtherCase(
            settings={"base": torch.optim.AdamW}, plugin={"transformer_cls_names_to_wrap": blocks}
        )
        for blocks in (None, ["BertLayer"])
    },
}
LOOKS_BEYOND = "looks at whole tensors, or is not known not to"
SAID: dict[str, tuple[str, ...]] = {
    **{
        name: (f"ValueError: {name} {LOOKS_BEYOND}", "Use torch.optim.AdamW")
        for name in ("Adafactor", "Unknown", "Muon")
    },
    "AdamW8bit": ("blocks of a whole weight", "Use torch.optim.AdamW"),
}
"""Of each optimizer that is refused."""


def prepare_other(rank: int, num_ranks: int, name: str) -> str:
    if name == "AdamW8bit":
        from bitsandbytes.optim import AdamW8bit

        return refusal_of(OtherCase(settings={"base": AdamW8bit}), "fsdp2", rank)
    return refusal_of(OTHERS[name], "fsdp2", rank)


ROOMS = (0, 20_000, 10**9)
"""`prefetch_bytes`: nothing, some pieces of a group, and all of them."""


def train_with_room(rank: int, num_ranks: int, room: int) -> dict[str, Any]:
    """A rank's result of two cycles and a step, and the most state that a forward found held."""
    case = HiFTCase(dtype=torch.bfloat16, settings={"stream_bytes": 8_192, "prefetch_bytes": room})
    held: list[int] = []
    with running(case, "fsdp2", rank) as run, Ledger() as ledger:
        run.model.lm_head.register_forward_pre_hook(lambda *_: held.append(ledger.current().state))
        run.train(0, case.updates)
        return {**case.result(run), "held": max(held)}


def errors_in_passes(rank: int, num_ranks: int) -> list[str]:
    """What the user reads of an error of the model's own, in a forward and in a backward."""
    fail = mock.Mock(side_effect=RuntimeError("of the model's own"))
    messages = []
    with running(HiFTCase(), "fsdp2", rank) as run:
        block = run.model.model.layers[1]
        for register in (block.register_forward_hook, block.register_full_backward_hook):
            handle = register(fail)
            messages.append(message_of(lambda: run.train(0, 1)))
            handle.remove()
    return messages


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_hold_nothing_of_a_weight_train_and_resume(name: str, tmp_path: Path) -> None:
    model = CASES[name].build_model()
    groups = [["first.weight", "first.bias"], ["second.weight", "second.bias"], ["last.weight"]]
    OneProcess(model, groups, ranks=2, make_batch=NARROW.batch).run(NARROW.updates)
    ranks = run_ranks(train_narrow, 2, name, tmp_path)
    for each in ranks:
        assert differing(each["straight"], weights(model)) == []
        assert differing(each["straight"], each["resumed"]) == []
    assert ranks[1]["empty"] == 2


def test_state_that_is_loaded_ahead_changes_no_bit() -> None:
    for nothing, some, everything in zip(*(run_ranks(train_with_room, 2, room) for room in ROOMS), strict=True):
        assert nothing["held"] == 0 < some["held"] <= ROOMS[1] < everything["held"]
        for other in (some, everything):
            for what in ("weights", "state"):
                assert differing(other[what], nothing[what]) == [], what


@pytest.mark.parametrize("name", SAID)
def test_what_looks_beyond_a_shard_is_refused_at_prepare(name: str) -> None:
    if name == "AdamW8bit":
        pytest.importorskip("bitsandbytes")
    for message in run_ranks(prepare_other, 2, name):
        assert all(part in message for part in SAID[name]), message


@pytest.mark.parametrize("name", ["declared", "blocks ['BertLayer']"])
def test_what_is_declared_elementwise_and_blocks_that_are_named_pass(name: str) -> None:
    assert run_ranks(prepare_other, 2, name) == ["", ""]


def test_a_unit_that_holds_the_embedding_is_refused_with_what_to_set() -> None:
    message = (
        "ValueError: BertEmbeddings holds the input embedding, which accelerate gathers on its own under FSDP2. "
        "Set fsdp_transformer_layer_cls_to_wrap: BertLayer in the fsdp_config of your configuration"
    )
    assert run_ranks(prepare_other, 2, "blocks None") == [message] * 2


def test_an_error_of_the_models_own_stays_as_it_is() -> None:
    assert run_ranks(errors_in_passes, 2) == [["RuntimeError: of the model's own"] * 2] * 2
