"""HiFT under DDP with a GradScaler, which only this layout can have."""

from typing import Any

import torch

from slivertune import HiFT
from slivertune.parallel.ddp.hift import share_hift
from tests.helpers.models import differing, tiny_llama, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import naive_groups
from tests.parallel.reference import ADAMW, OneProcess, batch_of


def overflow_on_one_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    """fp32 weights under a GradScaler; at updates 2 and 6 the loss of rank 1 overflows."""
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, **ADAMW)
    share_hift(model, hift)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    scales = []
    for update in range(12):
        loss = model(**batch_of(update, 0, rank)).loss
        if rank == 1 and update in (2, 6):
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(hift)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(hift)
        scaler.update()
        model.zero_grad()
        scales.append(scaler.get_scale())
    return {"updates": hift.updates, "scales": scales, "weights": weights(model)}


def test_an_overflow_on_one_rank_skips_the_step_on_both() -> None:
    model = tiny_llama()
    alone = OneProcess(model, naive_groups(model, 1), ranks=2, max_norm=0.05, lr_of=lambda updates: 1.0)
    alone.run(12, skip=(2, 6))
    for each in run_ranks(overflow_on_one_rank, 2):
        assert each["updates"] == 10
        assert each["scales"] == [1024.0] * 2 + [512.0] * 4 + [256.0] * 6
        # Scaled by powers of two: the same bits.
        assert differing(each["weights"], weights(model)) == []
