"""TokenTune on every layout: what each of two ranks does, and the same in one process that is told which positions
each rank drew.

That process runs twice: by the detached full graph, which shares nothing with the package; and by TokenTune itself,
whose draws are forced, under a plain loop of plain optimizers. The second rounds as the ranks do, to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.layout import Layout
from slivertune.tokentune import hook
from tests.helpers.models import weights
from tests.helpers.reference import naive_groups
from tests.parallel.contract.hift import masters_of
from tests.parallel.contract.runs import Case, Run, load, running, save
from tests.parallel.reference import OneProcess, whole_weights
from tests.tokentune.families import FAMILIES, Batch, make_batch, make_model
from tests.tokentune.reference import reference_loss

NUM_GROUPS = 5
"""Embedding, three blocks, head."""
OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.1}
"""The epsilon is large, since at 1e-8 Adam makes steps of the full rate out of rounding where gradients vanish."""
SPARSE = st.SFTConfig(density=0.25, reselection_interval=4, estimation_steps=2, replacement_rate=0.3)
"""So dense that what is largest in the mean gradient is among the candidates of every rank."""
TOKENS = st.TokenTune(ratio=0.4, chunk_size=3, seed=5)

Method = Literal["adamw", "hift", "lora", "sft"]
Weights = dict[str, torch.Tensor]
Outcome = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan(Case):
    """One training run."""

    method: Method
    family: str = "llama, grouped"
    layers_per_group: int = 1
    steps_per_group: int = 1
    stop_after: int | None = None
    """Updates after which everything is saved, thrown away, built anew and loaded."""
    attach_last: bool = False
    """Whether TokenTune is attached to what `prepare` returned, not to the model before."""

    @property
    def is_bf16(self) -> bool:
        """Whether anything is computed in bf16."""
        return self.dtype == torch.bfloat16 or self.mixed_precision == "bf16"

    def build_model(self, seed: int = 0) -> nn.Module:
        """The model as every rank and the reference begin with it."""
        model: Any = make_model(FAMILIES[self.family]).to(self.dtype)
        if self.method == "lora":
            from peft import LoraConfig, get_peft_model

            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = get_peft_model(
                    model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
                )
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        nn.init.normal_(parameter, std=0.1)
        return model

    def build_optimizer(self, model: nn.Module, **changes: Any) -> Any:
        if self.method == "hift":
            return st.HiFT(
                model,
                torch.optim.AdamW,
                config=st.HiFTConfig.paper(
                    layers_per_group=self.layers_per_group, steps_per_group=self.steps_per_group
                ),
                **OPTIONS,
            )
        if self.method == "sft":
            return st.SFT(model, config=SPARSE, total_steps=self.updates, lr=0.02, eps=1e-2)
        return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], **OPTIONS)

    def batch(self, update: int, micro: int, rank: int) -> Batch:
        return make_batch(FAMILIES[self.family], "padded right", seed=1000 + 100 * update + 10 * micro + rank)

    def result(self, run: TokenRun) -> Outcome:  # type: ignore[override]
        """What one rank had at the end; HiFT's masters as far as this rank knows them, where it has any."""
        return {
            "weights": deltas_of(run.sliver)
            if (self.method == "sft")
            else whole_weights(run.accelerator.unwrap_model(run.model)),
            "selections": run.selections,
            "losses": run.losses,
            "masters": masters_of(run) if self.method == "hift" else {},
            "norms": run.norms,
            "engine": type(run.model).__name__,
            "most gathered": max(run.gathered, default=0),
        }

    def engine_config(self, stage: int) -> dict[str, Any]:
        config = super().engine_config(stage)
        config["zero_optimization"] = {
            "stage": stage,
            "reduce_bucket_size": 2000,
            # Weights are gathered when a module needs them, and released when it has run.
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        }
        return {**config, "train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": self.is_bf16}}


def watch_gathered(engine: Any) -> list[int]:
    """A list that grows with every module that ZeRO-3 gathers, by the number of weights that are whole by then."""
    found: list[int] = []
    offload = getattr(engine.optimizer, "parameter_offload", None) if hasattr(engine, "optimizer") else None
    if offload is not None:
        coordinator = offload.get_param_coordinator()
        fetch = coordinator.fetch_sub_module
        parameters = list(engine.module.parameters())

        def watched(*args: Any, **kwargs: Any) -> None:
            fetch(*args, **kwargs)
            found.append(sum(each.ds_numel for each in parameters if each.ds_status.name == "AVAILABLE"))

        coordinator.fetch_sub_module = watched
    return found


def deltas_of(sft: Any) -> Weights:
    """What SFT adds to each tensor it trains, flat and dense: the same wherever the deltas live."""
    found = {}
    for name, delta in sft.deltas().items():
        found[name] = torch.zeros(math.prod(delta.shape)).index_copy(0, delta.indices.long(), delta.values.float())
    return found


class TokenRun(Run):
    """One rank's part of a run on a layout."""

    def __init__(self, plan: Plan, layout: Layout, accelerator: Any, rank: int, **more: Any) -> None:
        self.handle: Any = None
        super().__init__(plan, layout, accelerator, rank, **more)
        self.handle = self.handle or TOKENS.attach(self.model)
        accelerator.register_for_checkpointing(self.handle)
        self.gathered = watch_gathered(self.model)
        self.selections: list[torch.Tensor] = []

    def build_model(self, seed: int) -> nn.Module:
        model: Any = super().build_model(seed)
        if self.case.checkpointing is not None:
            enable_checkpointing(model, {"use_reentrant": self.case.checkpointing})
        if not self.case.attach_last:
            self.handle = TOKENS.attach(model)
        return model

    def forward(self, batch: Any) -> torch.Tensor:
        loss = super().forward(batch)
        self.selections.append(self.handle.last_selection.clone())
        return loss


def train(rank: int, num_ranks: int, layout: Layout, plan: Plan, folder: Path) -> Outcome:
    """A whole run, or two halves of it with a checkpoint between them."""
    stop = plan.updates if plan.stop_after is None else plan.stop_after
    with running(plan, layout, rank, kind=TokenRun) as run:
        run.train(0, stop)
        if stop == plan.updates:
            return plan.result(run)
        save(run, folder)
    with running(plan, layout, rank, kind=TokenRun) as resumed:
        load(resumed, folder)
        resumed.selections, resumed.losses = run.selections, run.losses
        return plan.result(resumed.train(stop, plan.updates))


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
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in self.rotation.active)
        self._rank, self._positions = rank, self.selections[rank][update * self.accumulation + micro]
        return self.plan.batch(update, micro, rank)

    def draw(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._positions

    def note(self, module: Any, args: Any, output: Any) -> None:
        self.of_ranks[self._rank].append(float(output.loss.detach()))


def replay_forced(plan: Plan, selections: Selections, layout: Layout = "single") -> Replayed:
    """The updates of a HiFT run, by TokenTune on one process, from the ranks' own draws.

    Args:
        plan: The run.
        selections: The draws.
        layout: Where they were drawn; matters in mixed precision, of which each has a kind of its own.
    """
    forced = _Forced(plan, selections, layout)
    with TOKENS.attach(forced.model), mock.patch.object(hook, "draw_positions", forced.draw):
        forced.model.register_forward_hook(forced.note)
        forced.run(plan.updates)
    return Replayed(
        weights=weights(forced.model),
        losses=forced.of_ranks,
        masters={name: master.detach() for name, master in forced.masters.items()},
        norms=[] if plan.clip is None else forced.norms,
    )
