"""What a script does to a prepared model between two steps: it changes nothing on any layout, or an error says so.

Other weights that it puts in are where the next steps start, or an error says so.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from slivertune import SFT
from slivertune.core.layout import Layout
from slivertune.parallel.zero.shares import fp32_weights
from tests.helpers.models import LAYERS, differing, tiny_llama, weights
from tests.helpers.ranks import ran_once
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import LAYOUTS, ZERO, Case, message_of, running
from tests.parallel.contract.sft import SFTCase
from tests.parallel.reference import whole_weights

pytestmark = pytest.mark.slow

# Two updates in a turn: where it changes, everything is frozen anew.
CASES: dict[str, Case] = {
    "hift": HiFTCase(updates=2 * LAYERS, settings={"steps_per_group": 2}, clip=1e9),
    "sft": SFTCase(model="llama", density=0.1, updates=7),
}
IN_SHARDS: tuple[Layout, ...] = ("fsdp2", "zero3")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
AT_ANY_RATE = {kind: HiFTCase(dtype=dtype, is_scheduled=False) for kind, dtype in DTYPES.items()}
SPARSE = SFTCase(model="llama", density=0.1, interval=0)
Change = Callable[[Any], object]
"""Of the user's own model, which the prepared one wraps or is."""


def new_head(model: Any) -> None:
    model.lm_head = nn.Linear(32, 97, bias=False)


def new_projection(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj = nn.Linear(32, 32, bias=False)


def new_parameter(model: Any) -> None:
    model.probe = nn.Linear(2, 2)


def cast(model: Any) -> None:
    model.to(torch.bfloat16)


def elsewhere(model: Any) -> None:
    """Other memory behind a weight, as `model.to(device)` and loaders make it."""
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def unfreeze(model: Any) -> None:
    """As PEFT's `disable_adapter` does when it ends."""
    model.requires_grad_(True)


def freeze(model: Any) -> None:
    model.requires_grad_(False)


def nothing(model: Any) -> None:
    pass


HARMLESS: dict[str, Change] = {"unfreeze": unfreeze, "freeze": freeze}
REFUSED: dict[str, dict[str, tuple[Change, str]]] = {
    "hift": {
        "new head": (new_head, "lm_head.weight, which HiFT trains, is no longer in the model"),
        "new parameter": (new_parameter, "probe.weight and 1 more came into the model after HiFT was built"),
        "cast": (cast, "was torch.float32 when HiFT was built and is torch.bfloat16 now"),
    },
    "sft": {
        "new projection": (new_projection, "model.layers.1.self_attn.q_proj.weight was replaced after SFT was built"),
        "new parameter": (new_parameter, "probe.weight came into the model after SFT was built"),
    },
}
CHANGES: dict[str, dict[str, Change]] = {
    method: {
        "nothing": nothing,
        "elsewhere": elsewhere,
        **HARMLESS,
        **{name: change for name, (change, _) in REFUSED[method].items()},
    }
    for method in CASES
}
OF_REFUSED = [(method, change) for method in CASES for change in REFUSED[method]]


def changed_on_its_way(rank: int, num_ranks: int, method: str, layout: Layout, name: str) -> Any:
    """What the training came to, or what was said."""
    case, change = CASES[method], CHANGES[method][name]
    with running(case, layout, rank) as run:

        def train() -> None:
            run.train(0, 3)
            for update in range(3, case.updates):
                change(run.plain)
                run.train(update, update + 1)

        message = message_of(train)
        if message:
            return message
        if isinstance(case, HiFTCase):
            return whole_weights(run.model)
        return {
            f"{name}.{key}": value
            for name, values in case.result(run)["state"].items()
            for key, value in values.items()
        }


def put_in(model: nn.Module, values: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Write weights as averaging libraries do, which leaves no trace; under ZeRO-3, what rank 0 writes goes to all."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(model.parameters()), modifier_rank=0) if layout == "zero3" else nullcontext():
        for name, parameter in model.named_parameters():
            value = values[name.removeprefix("module.")]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(value)


def hift_on(rank: int, num_ranks: int, layout: Layout, kind: str, folder: Path) -> dict[str, Any]:
    """A cycle, other weights, and a cycle at rate zero, before which a checkpoint is written under ZeRO."""
    dtype = DTYPES[kind]
    with running(AT_ANY_RATE[kind], layout, rank) as run:
        run.train(0, LAYERS)
        trained = differing(whole_weights(run.model), weights(tiny_llama(dtype)))
        put_in(run.model, weights(tiny_llama(dtype, seed=7)), layout)
        if layout in ZERO and kind == "bf16":
            run.model.save_checkpoint(str(folder / kind / layout))
        for group in run.sliver.param_groups:
            group["lr"] = 0.0
        run.train(LAYERS, 2 * LAYERS)
        return {"weights": whole_weights(run.model), "trained": trained, "updates": run.sliver.updates}


def sft_on(rank: int, num_ranks: int, layout: Layout) -> dict[str, Any]:
    """Some steps, other weights, and what was trained next, or what was said."""
    with running(SPARSE, layout, rank) as run:
        run.train(0, 2)
        put_in(run.model, {**whole_weights(run.model), **new_targets(run.sliver)}, layout)
        found: dict[str, Any] = {"step": message_of(lambda: run.train(2, 3)), "updates": run.sliver.updates}
        if layout not in IN_SHARDS:
            found["bases"] = run.sliver.base_values()
            found["expected"] = {
                name: new_targets(run.sliver)[name].view(-1)[at.long()] for name, at in run.sliver.positions().items()
            }
        return {**found, "merge": message_of(run.sliver.detach)}


def new_targets(sft: SFT) -> dict[str, torch.Tensor]:
    other = weights(tiny_llama(seed=7))
    return {name: other[name] for name in sft.positions()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loaded")


Changed = Callable[[str, Layout, str], list[Any]]
OnRanks = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def changed() -> Changed:
    return ran_once(changed_on_its_way, 2)


@pytest.fixture(scope="module")
def of_hift(folder: Path) -> OnRanks:
    return ran_once(hift_on, 2, folder)


@pytest.fixture(scope="module")
def of_sft() -> OnRanks:
    return ran_once(sft_on, 2)


RANKS = pytest.mark.parametrize("rank", [0, 1])


@RANKS
@pytest.mark.parametrize("change", HARMLESS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", CASES)
def test_requires_grad_of_others_changes_nothing(
    method: str, layout: Layout, change: str, rank: int, changed: Changed
) -> None:
    assert differing(changed(method, layout, change)[rank], changed(method, layout, "nothing")[rank]) == []


@RANKS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("method", "change"), OF_REFUSED)
def test_other_tensors_are_an_error_that_names_them(
    method: str, layout: Layout, change: str, rank: int, changed: Changed
) -> None:
    # FSDP2 itself refuses to cast its shards.
    expected = "Couldn't swap" if (layout, change) == ("fsdp2", "cast") else REFUSED[method][change][1]
    assert expected in changed(method, layout, change)[rank]


@RANKS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_memory_behind_a_weight_is_followed_or_an_error(layout: Layout, rank: int, changed: Changed) -> None:
    found = changed("hift", layout, "elsewhere")[rank]
    if layout in ("zero1", "zero2"):
        assert "lm_head.weight is no longer in the memory that DeepSpeed gave it" in found
    else:
        assert differing(found, changed("hift", layout, "nothing")[rank]) == []


@RANKS
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cycle_at_rate_zero_does_not_bring_the_old_weights_back(
    layout: Layout, kind: str, rank: int, of_hift: OnRanks
) -> None:
    new, found = weights(tiny_llama(DTYPES[kind], seed=7)), of_hift(layout, kind)[rank]
    assert found["updates"] == 2 * LAYERS
    assert sorted(found["trained"]) == sorted(new)
    assert differing(found["weights"], new) == []


@pytest.mark.parametrize("layout", ZERO)
def test_a_checkpoint_that_is_written_before_the_next_step_has_their_masters(
    layout: Layout, folder: Path, of_hift: OnRanks
) -> None:
    new = weights(tiny_llama(torch.bfloat16, seed=7))
    assert of_hift(layout, "bf16")
    (saved,) = [path for path in (folder / "bf16" / layout).iterdir() if path.is_dir()]
    masters = fp32_weights(saved)
    assert differing({name: masters[name].to(torch.bfloat16) for name in new}, new) == []


@RANKS
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in IN_SHARDS])
def test_sft_takes_whole_weights_for_pretrained_ones(layout: Layout, rank: int, of_sft: OnRanks) -> None:
    found = of_sft(layout)[rank]
    assert found["step"] == found["merge"] == ""
    assert found["updates"] == 3
    assert differing(found["bases"], found["expected"]) == []


@RANKS
@pytest.mark.parametrize("act", ["step", "merge"])
@pytest.mark.parametrize("layout", IN_SHARDS)
def test_sft_refuses_weights_that_were_put_into_shards(layout: Layout, act: str, rank: int, of_sft: OnRanks) -> None:
    found = of_sft(layout)[rank]
    assert found["updates"] == 2
    assert "self_attn.q_proj.weight were changed outside of SFT" in found[act]
    assert "before slivertune.prepare" in found[act]
