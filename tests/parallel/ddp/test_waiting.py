"""HiFT's waiting layers in fewer bits under DDP: the updates of one process, and ranks that part are named."""

from typing import Any

import pytest
import torch

from slivertune import HiFT, HiFTConfig
from slivertune.parallel.ddp.hift import share_hift
from tests.helpers.models import differing, tiny_llama
from tests.helpers.ranks import run_ranks
from tests.parallel.reference import ADAMW, batch_of


def exact(model: Any) -> dict[str, torch.Tensor]:
    return {name: value + 0 for name, value in model.state_dict().items()}


def two_cycles(rank: int, num_ranks: int, weights: Any) -> dict[str, Any]:
    """From other weights on each rank; and one process's on the mean of both losses."""
    model = tiny_llama(torch.bfloat16, seed=rank)
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(waiting="int8", weights=weights), **ADAMW)
    share_hift(model, hift)
    alone = tiny_llama(torch.bfloat16)
    lone = HiFT(alone, torch.optim.AdamW, config=HiFTConfig.paper(waiting="int8"), **ADAMW)
    lone.use_sidecar("DDP")  # it steps by itself here, whatever ranks there are
    first = exact(model)
    for update in range(2 * hift.num_groups):
        model(**batch_of(update, 0, rank)).loss.backward()
        hift.step()
        losses = [alone(**batch_of(update, 0, each)).loss for each in range(num_ranks)]
        (sum(losses) / num_ranks).backward()  # type: ignore[union-attr]
        lone.step()
    return {"first": first, "weights": exact(model), "alone": exact(alone)}


@pytest.mark.parametrize("place", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_ranks_make_the_updates_of_one_process(place: str) -> None:
    results = run_ranks(two_cycles, 2, place)
    start = exact(tiny_llama(torch.bfloat16))
    for each in results:
        assert differing(each["first"], start) == [], "weights are those of rank 0"
        for name, value in each["weights"].items():
            # bf16 gradients are rounded before and after the mean, in another order.
            torch.testing.assert_close(value, each["alone"][name], rtol=0.02, atol=2e-3, msg=name)
    assert differing(results[0]["weights"], results[1]["weights"]) == []
    assert differing(results[0]["weights"], start) != []


def other_codes_on_one_rank(rank: int, num_ranks: int) -> str:
    """A waiting weight of rank 1 is written in mid-run."""
    model = tiny_llama(torch.bfloat16)
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(waiting="int8"), **ADAMW)
    share_hift(model, hift)
    try:
        for update in range(2 * hift.num_groups):
            if update == 3 and rank == 1:
                name = "model.layers.0.mlp.up_proj.weight"
                model.load_state_dict({name: model.state_dict()[name] + 1}, strict=False)
            model(**batch_of(update, 0, rank)).loss.backward()
            hift.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_whose_waiting_weights_part_are_told() -> None:
    for text in run_ranks(other_codes_on_one_rank, 2):
        assert "bits" in text


def test_layouts_of_shards_are_refused() -> None:
    hift = HiFT(tiny_llama(), torch.optim.AdamW, config=HiFTConfig.paper(waiting="int8"), **ADAMW)
    for layout in ("fsdp2", "zero1", "zero2", "zero3"):
        refusal = hift.unsupported(layout)  # type: ignore[arg-type]
        assert refusal is not None and "waiting='int8' is not available under" in refusal and "DDP" in refusal
    assert hift.unsupported("ddp") is None
