"""TokenTune on every layout: what two ranks do, and what one process makes of the positions that they drew."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from torch import nn

import slivertune as st
from slivertune.parallel.layout import Layout
from tests.tokentune.families import FAMILIES, Batch, make_batch, make_model
from tests.tokentune.reference import reference_loss

FAMILY = FAMILIES["llama, grouped"]
NUM_GROUPS = 5
"""Embedding, three blocks, head."""
OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.1}
"""The epsilon is large, since at 1e-8 Adam makes steps of the full rate out of rounding where gradients vanish."""
SPARSE = st.SFTConfig(density=0.25, reselection_interval=4, estimation_steps=2, replacement_rate=0.3)
"""So dense that what is largest in the mean gradient is among the candidates of every rank."""
TOKENS = st.TokenTune(ratio=0.4, chunk_size=3, seed=5)

Method = Literal["adamw", "hift", "lora", "sft"]
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training run."""

    method: Method
    num_updates: int
    accumulation: int = 1
    checkpointing: bool = False
    stop_after: int | None = None
    """Updates after which everything is saved, thrown away, built anew and loaded."""
    attach_last: bool = False
    """Whether TokenTune is attached to what `prepare` returned, not to the model before."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank had at the end."""

    weights: Weights
    selections: list[torch.Tensor]
    """One for each forward."""
    losses: list[float]
    engine: str
    most_gathered: int
    """Weights that ZeRO-3 held whole at a time, at most; 0 elsewhere."""


def batch_of(update: int, micro: int, rank: int) -> Batch:
    return make_batch(FAMILY, "padded right", seed=1000 + 100 * update + 10 * micro + rank)


def accelerator_of(layout: Layout, accumulation: int) -> Accelerator:
    """A new Accelerator of a layout, on CPU ranks whose process group exists."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if layout.startswith("zero"):
        zero = {
            "stage": int(layout[-1]),
            "reduce_bucket_size": 2000,
            # Weights are gathered when a module needs them, and released when it has run.
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        }
        config = {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
        gloo = InitProcessGroupKwargs(backend="gloo")
        return Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation, kwargs_handlers=[gloo])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    if layout == "fsdp2":
        # Accelerate chooses FSDP for GPUs alone.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state: Any = accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
        )
    return accelerator


def make_trained_model(method: Method, *, checkpointing: bool = False) -> Any:
    """The model as every rank and the reference begin with it."""
    model: Any = make_model(FAMILY)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(3)
            adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
            model = get_peft_model(model, adapters)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.1)
    return model


def make_optimizer(model: nn.Module, plan: Plan) -> Any:
    if plan.method == "hift":
        return st.HiFT(model, torch.optim.AdamW, **OPTIONS)
    if plan.method == "sft":
        return st.SFT(model, config=SPARSE, total_steps=plan.num_updates, lr=0.02, eps=1e-2)
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], **OPTIONS)


def whole_weights(model: nn.Module) -> Weights:
    """All weights of a prepared model; every rank asks together."""
    found = {}
    parameter: Any
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().cpu().clone()
        elif hasattr(parameter, "full_tensor"):
            found[name] = parameter.detach().full_tensor().clone()
        else:
            found[name] = parameter.detach().clone()
    return found


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
        dense = torch.zeros(math.prod(delta.shape))
        found[name] = dense.index_copy(0, delta.indices.long(), delta.values.float())
    return found


class Run:
    """One rank's part of a run on a layout."""

    def __init__(self, layout: Layout, plan: Plan) -> None:
        self.plan = plan
        self.accelerator = accelerator_of(layout, plan.accumulation)
        network = make_trained_model(plan.method, checkpointing=plan.checkpointing)
        handle = None if plan.attach_last else TOKENS.attach(network)
        self.built = make_optimizer(network, plan)
        self.model, self.optimizer = st.prepare(self.accelerator, network, self.built)
        self.handle = handle or TOKENS.attach(self.model)
        self.accelerator.register_for_checkpointing(self.handle)
        self.gathered = watch_gathered(self.model)
        self.selections: list[torch.Tensor] = []
        self.losses: list[float] = []

    def train(self, rank: int, updates: range) -> None:
        for update in updates:
            for micro in range(self.plan.accumulation):
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch_of(update, micro, rank)).loss
                    assert self.handle.last_selection is not None
                    self.selections.append(self.handle.last_selection.clone())
                    self.losses.append(float(loss.detach()))
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def outcome(self) -> Outcome:
        is_sparse = self.plan.method == "sft"
        network = self.accelerator.unwrap_model(self.model)
        return Outcome(
            weights=deltas_of(self.built) if is_sparse else whole_weights(network),
            selections=self.selections,
            losses=self.losses,
            engine=type(self.model).__name__,
            most_gathered=max(self.gathered, default=0),
        )


def train(rank: int, layout: Layout, plan: Plan, folder: str) -> Outcome:
    """A whole run, or two halves of it with a checkpoint between them."""
    run = Run(layout, plan)
    stop = plan.num_updates if plan.stop_after is None else plan.stop_after
    run.train(rank, range(stop))
    if stop == plan.num_updates:
        return run.outcome()
    run.accelerator.save_state(folder)
    resumed = Run(layout, plan)
    resumed.accelerator.load_state(folder)
    resumed.selections, resumed.losses = run.selections, run.losses
    resumed.train(rank, range(stop, plan.num_updates))
    return resumed.outcome()


def replay(plan: Plan, selections: list[list[torch.Tensor]]) -> tuple[Weights, list[list[float]]]:
    """The same updates in one process, by the detached full graph of the reference, from the ranks' own draws.

    Args:
        plan: The run.
        selections: Of each rank, one for each forward.

    Returns:
        The weights, and each rank's losses.
    """
    model = make_trained_model(plan.method)
    if plan.method == "sft":
        turns = [make_optimizer(model, plan)]  # SFT alone has references of its own
    else:
        turns = [torch.optim.AdamW(group, **OPTIONS) for group in trained_in_turn(model, plan.method)]
    network = model.get_base_model() if plan.method == "lora" else model
    num_ranks = len(selections)
    losses: list[list[float]] = [[] for _ in selections]
    for update in range(plan.num_updates):
        whole_batch = torch.zeros(())
        for micro in range(plan.accumulation):
            for rank, drawn in enumerate(selections):
                positions = drawn[update * plan.accumulation + micro]
                loss = reference_loss(network, FAMILY, batch_of(update, micro, rank), positions)
                losses[rank].append(float(loss.detach()))
                whole_batch = whole_batch + loss / (num_ranks * plan.accumulation)
        whole_batch.backward()
        turns[update % len(turns)].step()
        model.zero_grad()
    return deltas_of(turns[0]) if plan.method == "sft" else whole_weights(model), losses


def trained_in_turn(model: nn.Module, method: Method) -> list[list[nn.Parameter]]:
    """The parameters of each turn: embedding, each block, norm and head; all at once without HiFT."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if method != "hift":
        return [[parameter for _, parameter in named]]
    turns: dict[int, list[nn.Parameter]] = {}
    for name, parameter in named:
        block = int(name.split(".layers.")[1].split(".")[0]) + 1 if ".layers." in name else 0
        turns.setdefault(block if ".layers." in name or "embed" in name else 10**6, []).append(parameter)
    return [turns[turn] for turn in sorted(turns)]


def run_layout(rank: int, num_ranks: int, layout: Layout, plans: dict[str, Plan], folder: str) -> dict[str, Outcome]:
    """Every plan on one layout, one after the other; runs on every rank."""
    if layout.startswith("zero"):
        import deepspeed

        # DeepSpeed would first compile its shared-memory collectives for a minute; gloo does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    outcomes = {}
    for name, plan in plans.items():
        outcomes[name] = train(rank, layout, plan, f"{folder}/{name}")
        dist.barrier()
    return outcomes
