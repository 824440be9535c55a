"""What TokenTune on several ranks must equal: one process that is told which positions each rank drew.

Twice: by the detached full graph, which shares nothing with the package; and by TokenTune itself on one process, whose
draws are forced, under a plain loop of plain optimizers. The second rounds as the ranks do, which shows single bits.
"""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from slivertune.core.layout import Layout
from slivertune.tokentune import hook
from tests.helpers.models import weights
from tests.helpers.reference import naive_groups
from tests.parallel.reference import OneProcess
from tests.parallel.tokentune_runs import (
    OPTIONS,
    TOKENS,
    Plan,
    Weights,
    deltas_of,
)
from tests.tokentune.families import FAMILIES, Batch
from tests.tokentune.reference import reference_loss

Selections = list[list[torch.Tensor]]
"""Of each rank, one for each forward."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What one process had at the end."""

    weights: Weights
    losses: list[list[float]]
    """Each rank's."""
    masters: Weights
    """In fp32; of fp32 weights, the same numbers."""
    norms: list[float]
    """Of each update's gradient before it was clipped."""


def replay(plan: Plan, selections: Selections) -> Replayed:
    """The updates of a run in fp32, by the detached full graph of the reference, from the ranks' own draws."""
    model = plan.build_model()
    if plan.method == "hift":
        rotated = [
            torch.optim.AdamW([model.get_parameter(name) for name in names], **OPTIONS)
            for names in naive_groups(model, plan.layers_per_group)
        ]
    else:
        rotated = [plan.build_optimizer(model)]  # SFT alone has references of its own
    network = model.get_base_model() if plan.method == "lora" else model
    losses: list[list[float]] = [[] for _ in selections]
    norms = []
    for update in range(plan.updates):
        whole_batch = torch.zeros(())
        for micro in range(plan.accumulation):
            for rank, drawn in enumerate(selections):
                loss = reference_loss(
                    network,
                    FAMILIES[plan.family],
                    plan.batch(update, micro, rank),
                    drawn[update * plan.accumulation + micro],
                )
                losses[rank].append(float(loss.detach()))
                whole_batch = whole_batch + loss / (len(selections) * plan.accumulation)
        whole_batch.backward()
        active = rotated[update // plan.steps_per_group % len(rotated)]
        if plan.clip is not None:
            norms.append(
                float(
                    torch.nn.utils.clip_grad_norm_(
                        [parameter for group in active.param_groups for parameter in group["params"]], plan.clip
                    )
                )
            )
        active.step()
        model.zero_grad()
    trained_weights = deltas_of(rotated[0]) if plan.method == "sft" else weights(model)
    return Replayed(weights=trained_weights, losses=losses, masters=trained_weights, norms=norms)


class _Forced(OneProcess):
    """One process on which TokenTune selects what the ranks did, and which freezes what HiFT does.

    TokenTune runs layers that no gradient reaches on all tokens at once, and the last bits of a product's rows may
    depend on how many there are.
    """

    def __init__(self, plan: Plan, selections: Selections, layout: Layout) -> None:
        model = plan.build_model()
        mixes = plan.mixed_precision == "bf16"
        if mixes and layout == "ddp":
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        if mixes and layout.startswith("zero"):
            for parameter in model.parameters():  # as the engine does, which leaves buffers as they are
                parameter.data = parameter.data.to(torch.bfloat16)
        super().__init__(
            model,
            naive_groups(model, plan.layers_per_group),
            ranks=len(selections),
            accumulation=plan.accumulation,
            max_norm=plan.clip,
            steps_per_group=plan.steps_per_group,
            compute_dtype=torch.bfloat16 if mixes and layout == "fsdp2" else None,
            make_batch=self._rows_of,
            **OPTIONS,
        )
        self.plan, self.selections = plan, selections
        self.lr_of = lambda updates: 1.0
        self.of_ranks: list[list[float]] = [[] for _ in selections]
        self._rank = -1
        self._positions = torch.empty(0)

    def _rows_of(self, update: int, micro: int, rank: int) -> Batch:
        active = self.groups[update // self.steps_per_group % len(self.groups)]
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in active)
        self._rank, self._positions = rank, self.selections[rank][update * self.accumulation + micro]
        return self.plan.batch(update, micro, rank)

    def _draw(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._positions

    def _note(self, module: Any, args: Any, output: Any) -> None:
        self.of_ranks[self._rank].append(float(output.loss.detach()))

    def train(self) -> Replayed:
        with TOKENS.attach(self.model), mock.patch.object(hook, "draw_positions", self._draw):
            self.model.register_forward_hook(self._note)
            self.run(self.plan.updates)
        return Replayed(
            weights=weights(self.model),
            losses=self.of_ranks,
            masters={name: master.detach() for name, master in self.masters.items()},
            norms=[] if self.plan.clip is None else self.norms,
        )


def replay_forced(plan: Plan, selections: Selections, layout: Layout = "single") -> Replayed:
    """The updates of a HiFT run, by TokenTune on one process, from the ranks' own draws.

    Args:
        plan: The run.
        selections: The draws.
        layout: Where they were drawn; matters in mixed precision, of which each has a kind of its own.
    """
    return _Forced(plan, selections, layout).train()
