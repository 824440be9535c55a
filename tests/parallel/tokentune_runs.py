"""TokenTune on every layout: what each of two ranks does."""

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
from slivertune.core.layout import Layout
from tests.parallel.zero.runs import Case
from tests.parallel.zero.runs import Run as ZeroRun
from tests.tokentune.families import FAMILIES, Batch, make_batch, make_model

NUM_GROUPS = 5
"""Embedding, three blocks, head."""
OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.1}
"""The epsilon is large, since at 1e-8 Adam makes steps of the full rate out of rounding where gradients vanish."""
SPARSE = st.SFTConfig(density=0.25, reselection_interval=4, estimation_steps=2, replacement_rate=0.3)
"""So dense that what is largest in the mean gradient is among the candidates of every rank."""
TOKENS = st.TokenTune(ratio=0.4, chunk_size=3, seed=5)

Method = Literal["adamw", "hift", "lora", "sft"]
Weights = dict[str, torch.Tensor]
Rows = dict[str, tuple[int, torch.Tensor]]
"""Whole tensors or some of their rows, by name, with the first row's number."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training run."""

    method: Method
    num_updates: int
    family: str = "llama, grouped"
    dtype: torch.dtype = torch.float32
    mixed_precision: Literal["no", "bf16"] = "no"
    """Accelerate's: autocast beside DDP, FSDP2's policy, the engine's dtype under ZeRO."""
    accumulation: int = 1
    max_norm: float | None = None
    layers_per_group: int = 1
    steps_per_group: int = 1
    checkpointing: bool = False
    stop_after: int | None = None
    """Updates after which everything is saved, thrown away, built anew and loaded."""
    attach_last: bool = False
    """Whether TokenTune is attached to what `prepare` returned, not to the model before."""

    @property
    def is_bf16(self) -> bool:
        """Whether anything is computed in bf16."""
        return self.dtype == torch.bfloat16 or self.mixed_precision == "bf16"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank had at the end."""

    weights: Weights
    selections: list[torch.Tensor]
    """One for each forward."""
    losses: list[float]
    masters: Rows
    """HiFT's, as far as this rank knows them; without any where a weight is its own."""
    norms: list[float]
    """Before clipping, one for each update."""
    engine: str
    most_gathered: int
    """Weights that ZeRO-3 held whole at a time, at most; 0 elsewhere."""


def batch_of(plan: Plan, update: int, micro: int, rank: int) -> Batch:
    return make_batch(FAMILIES[plan.family], "padded right", seed=1000 + 100 * update + 10 * micro + rank)


def accelerator_of(layout: Layout, plan: Plan) -> Accelerator:
    """A new Accelerator of a layout, on CPU ranks whose process group exists."""
    accumulation = plan.accumulation
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
            "gradient_clipping": plan.max_norm or 0.0,
            "bf16": {"enabled": plan.is_bf16},
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
        gloo = InitProcessGroupKwargs(backend="gloo")
        return Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation, kwargs_handlers=[gloo])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=plan.mixed_precision)
    if layout == "fsdp2":
        # Accelerate chooses FSDP for GPUs alone.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state: Any = accelerator.state
        state.distributed_type = DistributedType.FSDP
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
        )
        if plan.mixed_precision != "no":
            plugin.set_mixed_precision(plan.mixed_precision)
        state.fsdp_plugin = plugin
    return accelerator


def make_trained_model(plan: Plan) -> Any:
    """The model as every rank and the reference begin with it."""
    model: Any = make_model(FAMILIES[plan.family]).to(plan.dtype)
    if plan.method == "lora":
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
        config = st.HiFTConfig(layers_per_group=plan.layers_per_group, steps_per_group=plan.steps_per_group)
        return st.HiFT(model, torch.optim.AdamW, config=config, **OPTIONS)
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


class _Trained(ZeroRun):
    """An engine that was trained elsewhere, for `ZeroRun.masters`."""

    def __init__(self, engine: Any) -> None:
        self.group_schedule = engine.hift_schedule
        self.case, self.num_ranks = Case(stage=self.group_schedule.stage), dist.get_world_size()
        self.names = {id(parameter): name for name, parameter in engine.module.named_parameters()}


def masters_of(engine: Any, hift: st.HiFT) -> Rows:
    """The fp32 masters: whole under ZeRO, gathered by every rank together; elsewhere those that HiFT holds here."""
    if hasattr(engine, "hift_schedule"):
        return {name: (0, master) for name, master in _Trained(engine).masters().items()}
    state = hift.whole_state()["state"]
    return {
        name: (getattr(weight, "first_row", 0), state[name]["master"].clone())
        for group in hift.groups
        for name, weight in zip(group.parameter_names, hift.weights_of(group.index), strict=True)
        if "master" in state.get(name, {})
    }


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
        self.accelerator = accelerator_of(layout, plan)
        network = make_trained_model(plan)
        if plan.checkpointing:
            network.gradient_checkpointing_enable({"use_reentrant": False})
        handle = None if plan.attach_last else TOKENS.attach(network)
        self.built = make_optimizer(network, plan)
        self.model, self.optimizer = st.prepare(self.accelerator, network, self.built)
        self.handle = handle or TOKENS.attach(self.model)
        self.accelerator.register_for_checkpointing(self.handle)
        self.gathered = watch_gathered(self.model)
        self.selections: list[torch.Tensor] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(self, rank: int, updates: range) -> None:
        for update in updates:
            for micro in range(self.plan.accumulation):
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch_of(self.plan, update, micro, rank)).loss
                    assert self.handle.last_selection is not None
                    self.selections.append(self.handle.last_selection.clone())
                    self.losses.append(float(loss.detach()))
                    self.accelerator.backward(loss)
                    if self.plan.max_norm is not None and self.accelerator.sync_gradients:
                        norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), self.plan.max_norm)
                        self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def outcome(self) -> Outcome:
        is_sparse = self.plan.method == "sft"
        network = self.accelerator.unwrap_model(self.model)
        return Outcome(
            weights=deltas_of(self.built) if is_sparse else whole_weights(network),
            selections=self.selections,
            losses=self.losses,
            masters=masters_of(self.model, self.built) if self.plan.method == "hift" else {},
            norms=self.norms,
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
