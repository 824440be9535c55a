"""Runs of SFT on ranks for the tests: one case, one layout, one rank's part of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

import slivertune as st
from slivertune import SFT, Ledger, SFTConfig
from slivertune.core.layout import Layout
from tests.helpers.models import Batch, assert_same_tree, differing, tiny_llama, token_batches, weights
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.parallel.sft.reference import (
    CAP,
    NAMES,
    PrescribedLayers,
    RanksNaive,
    assert_merged,
    assert_norms_are,
    assert_state_is,
    assert_state_is_near,
    rank_gradients,
)
from tests.sft.reference import Gradients, NaiveSFT

OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated_gradient": {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-4},
    "momentum": {"lr": 1e-2, "eps": 1e-30},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run; with `interval` 5 and `gamma` 3 weights are reselected after 3 (AG) or 5, 10, 15, ... updates."""

    selection: str = "accumulated_gradient"
    model: str = "prescribed"
    updates: int = 17
    total: int = 40
    interval: int = 5
    gamma: int = 3
    alpha: float = 0.5
    density: float = 0.15
    accumulation: int = 1
    clip: float | None = None
    dtype: torch.dtype = torch.float32
    mixed_precision: str = "no"
    tied: bool = False
    checkpointing: bool | None = None
    """`use_reentrant` of gradient checkpointing."""
    absent: bool = False
    """Whether rank 1 has no gradient for the second layer, and rank 0 none for the first one now and then."""
    shuffled: bool = False
    """Whether rank 0 comes by its gradients in another order."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More of SFTConfig."""

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS[self.selection]

    def config(self, **changes: Any) -> SFTConfig:
        chosen: dict[str, Any] = {
            "density": self.density,
            "selection": self.selection,
            "reselection_interval": self.interval,
            "estimation_steps": self.gamma,
            "replacement_rate": self.alpha,
            **self.settings,
            **changes,
        }
        return SFTConfig(**chosen)

    def build_model(self) -> nn.Module:
        if self.model == "prescribed":
            return PrescribedLayers(self.dtype)
        model: Any = tiny_llama(self.dtype, tied=self.tied)
        if self.checkpointing is not None:
            model.activation_checkpointing_enable({"use_reentrant": self.checkpointing})
            if self.checkpointing:
                model.enable_input_require_grads()
        return model

    def build(self, **changes: Any) -> tuple[nn.Module, SFT]:
        model = self.build_model()
        if self.model == "prescribed":
            changes.setdefault("targets", NAMES)
        return model, SFT(model, config=self.config(**changes), total_steps=self.total, **self.options)

    def batch(self, update: int, micro: int, rank: int) -> Any:
        if self.model == "prescribed":
            found = rank_gradients(update, micro, rank, self.dtype)
            if self.absent:
                if rank == 1 and update % 2 == 0:
                    del found[NAMES[1]]
                if rank == 0 and update in (0, 3, 7):
                    del found[NAMES[0]]
            return dict(reversed(found.items())) if self.shuffled and rank == 0 else found
        return token_batches(1, seed=1000 * update + 10 * micro + rank)[0]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch) if self.model == "prescribed" else model(**batch).loss
        return loss


@contextmanager
def accelerator_of(layout: Layout, case: Case, **plugin: Any) -> Iterator[Accelerator]:
    """An Accelerator of a layout on CPUs; forgets accelerate's shared state before and after."""
    _forget()
    options: dict[str, Any] = {
        "gradient_accumulation_steps": case.accumulation,
        "mixed_precision": case.mixed_precision,
    }
    if layout in ("ddp", "single"):
        accelerator = Accelerator(cpu=True, **options)
    elif layout == "fsdp2":
        os.environ["FSDP_VERSION"] = "2"
        accelerator = Accelerator(cpu=True, **options)
        # Accelerate chooses FSDP for GPUs alone.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            **{
                "fsdp_version": 2,
                "auto_wrap_policy": "transformer_based_wrap",
                "transformer_cls_names_to_wrap": [
                    "PrescribedBlock" if case.model == "prescribed" else "LlamaDecoderLayer"
                ],
                "reshard_after_forward": True,
                "cpu_ram_efficient_loading": False,
                **plugin,
            }
        )
        if case.mixed_precision != "no":
            accelerator.state.fsdp_plugin.set_mixed_precision(case.mixed_precision)
    else:
        quieten_deepspeed()
        accelerator = Accelerator(
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=engine_config(int(layout[-1]), case)),
            **options,
        )
    try:
        yield accelerator
    finally:
        accelerator.free_memory()
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def engine_config(stage: int, case: Case) -> dict[str, Any]:
    """DeepSpeed's config of a case."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip or 0.0,
        "steps_per_print": 10**9,
        **({"bf16": {"enabled": True}} if case.dtype == torch.bfloat16 else {}),
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 3000,
            "stage3_prefetch_bucket_size": 3000,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def quieten_deepspeed() -> None:
    """DeepSpeed without its minute of compiling, and without its log."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)


class Run:
    """One rank of a run under an Accelerator."""

    def __init__(self, case: Case, accelerator: Accelerator, rank: int, **changes: Any) -> None:
        self.case, self.accelerator, self.rank = case, accelerator, rank
        plain, self.sft = case.build(**changes)
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = st.prepare(accelerator, plain, self.sft)
        self.norms: list[float] = []
        self.losses: list[float] = []

    def train(self, first: int, last: int) -> None:
        case, accelerator = self.case, self.accelerator
        for update in range(first, last):
            for micro in range(case.accumulation):
                with accelerator.accumulate(self.model):
                    loss = case.loss(self.model, case.batch(update, micro, self.rank))
                    self.losses.append(loss.item())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(self.model.parameters(), case.clip or 1e9)
                        self.norms.append(float(norm))
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def result(self) -> dict[str, Any]:
        """State, whole weights, norms; all plain tensors."""
        return {
            "state": plain_state(self.sft),
            "norms": list(self.norms),
            "losses": list(self.losses),
            "updates": self.sft.updates,
        }


AG = "accumulated_gradient"
MA = "momentum"
EXACT: dict[str, Case] = {
    "AG": Case(),
    "AG, clipped, accumulated": Case(accumulation=2, clip=2.0),
    "AG in bf16, accumulated": Case(dtype=torch.bfloat16, accumulation=2),
    "AG, phases that overlap": Case(interval=4, gamma=3),
    "MA": Case(selection=MA),
    "MA, clipped, accumulated": Case(selection=MA, accumulation=2, clip=2.0),
    "MA in bf16, accumulated": Case(selection=MA, dtype=torch.bfloat16, accumulation=2),
}
"""Runs whose gradients are prescribed, so that nothing but the library's own choices can differ."""
LLAMA: dict[str, Case] = {
    "AG": Case(model="llama", density=0.25),
    "AG, tied, reentrant checkpoints": Case(model="llama", density=0.25, tied=True, checkpointing=True, updates=11),
    "AG, checkpoints, clipped, accumulated": Case(
        model="llama", density=0.4, checkpointing=False, accumulation=2, clip=0.15, updates=6
    ),
    "MA, reentrant checkpoints": Case(
        model="llama", selection=MA, density=0.1, checkpointing=True, interval=3, updates=7
    ),
    "MA, tied, checkpoints, clipped, accumulated": Case(
        model="llama",
        selection=MA,
        density=0.1,
        tied=True,
        checkpointing=False,
        accumulation=2,
        clip=0.08,
        interval=3,
        updates=7,
    ),
}
"""With a quarter of the weights trained, half of them are in each rank's list. No entry of the mean's largest quarter
is missing there, so the candidates are those of the dense gradient, and the reference is that of one process. Of
several micro-batches every weight that is not trained has to be in the lists, so there 0.4 of them are."""
QUICK = ("AG, clipped, accumulated", "MA, clipped, accumulated", "Llama: AG, checkpoints, clipped, accumulated")
"""What `make test` runs of both, where a layout's tests call those "Llama: ..."."""
BF16: dict[str, Case] = {
    "AG": Case(model="llama", density=0.4, dtype=torch.bfloat16, updates=6),
    "MA": Case(model="llama", selection=MA, density=0.1, dtype=torch.bfloat16, interval=3, updates=7),
}
"""Where gradients are rounded to bf16, only the same product over the same batches gives the same bits: the reference
is the library in one process, which takes each rank's batch as a micro-batch."""


def train_all(
    rank: int, num_ranks: int, layouts: list[Layout], cases: dict[str, Case], folder: Path | None = None
) -> dict[tuple[str, str], Any]:
    """Train every case under every layout; results by layout and case.

    `folder/layout/case` then holds the merged Llamas as Hugging Face checkpoints.
    """
    found: dict[tuple[str, str], Any] = {}
    for layout in layouts:
        for name, case in cases.items():
            with accelerator_of(layout, case) as accelerator:
                run = Run(case, accelerator, rank)
                run.train(0, case.updates)
                found[layout, name] = run.result()
                merged = found[layout, name]["weights"] = merged_weights(run)
                if folder is not None and case.model == "llama":
                    plain = accelerator.unwrap_model(run.model)
                    plain.save_pretrained(folder / layout / name, is_main_process=rank == 0, state_dict=dict(merged))
                if layout.startswith("zero"):
                    engine = run.model
                    assert engine.zero_optimization_stage() == int(layout[-1]), layout
                    engine.destroy()
    return found


def assert_equal_to_one_process(results: list[dict[str, Any]], case: Case) -> None:
    """Every rank of a run has what the naive reference has of the whole batch."""
    assert sum(result["updates"] for result in results) == case.updates * len(results)
    if case.model == "prescribed":
        naive, norms = prescribed_reference(case, len(results))
        for result in results:
            assert_state_is(result["state"], naive)
            assert_norms_are(result["norms"], norms, naive, case.accumulation)
    else:
        naive, norms = assert_near_one_process(results, case)
    assert case.clip is None or min(norms) < max(norms) > case.clip, "nothing was clipped"
    # Some layouts gather whole weights on rank 0 alone.
    assert results[0]["weights"]
    for result in results:
        if result["weights"]:
            assert_merged(result["weights"], result["state"], naive)


_references: dict[str, Any] = {}


def assert_near_one_process(
    results: list[dict[str, Any]], case: Case, start: Mapping[str, torch.Tensor] | None = None
) -> tuple[NaiveSFT, list[float]]:
    """Every rank of a Llama's run has what the naive reference has but for the order of the gradients' sums.

    Args:
        results: Of each rank.
        case: What was run.
        start: Pretrained weights in place of the case's own.

    Returns:
        The reference and its norms, which are computed once for all layouts.
    """
    key = f"{len(results)} {case}"
    known = _references.get(key) if start is None else None
    if known is None:
        known = with_exact(lambda: llama_reference(case, len(results), start))
        if start is None:
            _references[key] = known
    (naive, norms), (exact, exact_norms) = known
    for result in results:
        assert_state_is_near(result["state"], naive, exact)
        assert_step_close(result["norms"], norms, exact_norms, cap=CAP)
    return naive, norms


def assert_equal_to_one_process_in_bf16(results: list[dict[str, Any]], case: Case, *, in_layers: bool) -> None:
    """Every rank has the bits that the library alone has, of the ranks' batches one after another."""
    model, sft = case.build(**({"form": "layer"} if in_layers else {}))
    for update in range(case.updates):
        for rank in range(len(results)):
            (case.loss(model, case.batch(update, 0, rank)) / len(results)).backward()
        sft.step()
    state = plain_state(sft)
    for result in results:
        assert_same_tree(result["state"], state)
    sft.detach()
    merged = results[0]["weights"]
    assert differing({name: merged[name] for name in weights(model)}, weights(model)) == []


def plain_state(sft: SFT) -> dict[str, dict[str, torch.Tensor]]:
    """A copy of the state's tensors."""
    return {
        name: {key: value.clone() for key, value in each.items() if isinstance(value, torch.Tensor)}
        for name, each in sft.whole_state()["state"].items()
    }


def merged_weights(run: Run) -> dict[str, torch.Tensor]:
    """Every parameter after the deltas were merged, gathered by accelerate; on rank 0 at least."""
    run.sft.detach()
    gathered: dict[str, Any] = run.accelerator.get_state_dict(run.model) or {}
    wholes = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in gathered.items()}
    return {name: value.detach().cpu().clone() for name, value in wholes.items()}


def prescribed_reference(case: Case, num_ranks: int | list[int]) -> tuple[RanksNaive, list[float]]:
    """The naive reference after the whole case, and its norms.

    Args:
        case: What to run.
        num_ranks: Of the whole case, or of each of its first updates.
    """
    ranks_of = [num_ranks] * case.updates if isinstance(num_ranks, int) else num_ranks
    _, sft = case.build()
    naive = _naive(RanksNaive, case, sft)
    sft.detach()
    norms = []
    for update, count in enumerate(ranks_of):
        micros = [[case.batch(update, micro, rank) for rank in range(count)] for micro in range(case.accumulation)]
        scaled = [[_scaled(each, 1 / case.accumulation) for each in ranks] for ranks in micros]
        norms.append(naive.update_on_ranks(scaled))
    return naive, norms


def llama_reference(
    case: Case, num_ranks: int, start: Mapping[str, torch.Tensor] | None = None
) -> tuple[NaiveSFT, list[float]]:
    """The naive reference over a Llama's dense gradients, of the whole batch in one process.

    Args:
        case: What to run.
        num_ranks: Whose batches make the whole.
        start: Pretrained weights in place of the case's own.
    """
    model, sft = case.build()
    if start is not None:
        sft.detach()
        model.load_state_dict(start)
        sft = SFT(model, config=case.config(), total_steps=case.total, **case.options)
    naive = _naive(NaiveSFT, case, sft)
    sft.detach()
    model.requires_grad_(True)
    norms = []
    for update in range(case.updates):
        micros = []
        for name, weight in naive.weights().items():
            model.get_parameter(name).data.copy_(weight)
        for micro in range(case.accumulation):
            batches: list[Batch] = [case.batch(update, micro, rank) for rank in range(num_ranks)]
            whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
            model.zero_grad()
            (model(**whole).loss / case.accumulation).backward()
            micros.append({name: model.get_parameter(name).grad.clone() for name in naive.base})
        norms.append(naive.update(micros))
    return naive, norms


def _naive(kind: Any, case: Case, sft: SFT) -> Any:
    weights = {name: sft.model.get_parameter(name).detach().clone() for name in sft.positions()}
    active = {name: indices.long() for name, indices in sft.positions().items()}
    defaults = {"betas": (0.9, 0.999), "weight_decay": 0.0, "momentum": 0.0}
    return kind(
        weights,
        active,
        selection=case.selection,
        interval=case.interval,
        gamma=case.gamma,
        alpha=case.alpha,
        total=case.total,
        max_norm=case.clip,
        **{**defaults, **case.options},
    )


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    return {name: gradient.float() * factor for name, gradient in gradients.items()}


def state_of_one_process(case: Case, updates: int) -> tuple[list[int], int]:
    """Bytes of state after each update of a run in this process, and the weights that it trains."""
    found = []
    with Ledger(tiny_llama()) as ledger:
        model, sft = case.build()
        sft.claim_state()
        for update in range(updates):
            case.loss(model, case.batch(update, 0, 0)).backward()
            sft.step()
            found.append(ledger.current().state)
    return found, sft.num_weights


def count_bytes() -> list[tuple[str, int]]:
    """Count what this rank contributes to each collective from now on, by wrapping torch.distributed's functions."""
    sent: list[tuple[str, int]] = []
    for name in ("all_reduce", "all_gather", "broadcast", "all_gather_object"):
        original = getattr(dist, name)

        def counted(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            own = args[1] if _name == "all_gather" else args[0]
            sent.append((_name, own.nbytes if isinstance(own, torch.Tensor) else 0))
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    return sent
