"""Real runs of tiny models on two ranks of each layout, counted by the ledger from before the model is made.

Inside a rank. Engines take and free the memory of some tensors under them (their storage is resized), which no operator
shows; these are looked at before every operator.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import slivertune
from slivertune.core.ledger import Ledger, StateCount
from slivertune.parallel.ddp import gradient_sync
from slivertune.parallel.initialize import initialize
from slivertune.planning.request import PlanRequest
from slivertune.sft import adam
from tests.parallel.contract.runs import quiet
from tests.parallel.reference import on_fsdp2_ranks, on_ranks
from tests.planning.real import LLAMA, attach_hooks, real_batch, real_model, real_optimizer, searched_as_on_a_gpu

BUCKET_BYTES = 96 * 2**10
"""Of the gradient sync under DDP: fewer than a group's gradients, so that several are under way."""


class _Look(TorchDispatchMode):
    """Lets a ledger look at tensors again before each operator.

    Args:
        ledger: Entered before this.
        resized: The tensors whose storages come and go.
    """

    def __init__(self, ledger: Ledger, resized: Callable[[], list[torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._resized = ledger, resized

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._ledger.track(self._resized())
        return func(*args, **(kwargs or {}))


def all_peaks_on_rank(rank: int, num_ranks: int, requests: list[PlanRequest], config: Any = LLAMA) -> list[list[int]]:
    """`peaks_on_rank` of several runs, one after the other."""
    return [peaks_on_rank(rank, num_ranks, request, config) for request in requests]


def peaks_on_rank(rank: int, num_ranks: int, request: PlanRequest, config: Any = LLAMA) -> list[int]:
    """The bytes alive at the peak of each group's turn, in the second cycle."""
    gradient_sync.BUCKET_BYTES = BUCKET_BYTES
    model = real_model(request, config)
    optimizer: Any = real_optimizer(request, model)
    attach_hooks(request, model)
    if request.method == "sft":
        with searched_as_on_a_gpu():
            return _sparse_peaks(rank, request, model, optimizer)
    with _layout(request, model, optimizer) as (step, resized, made):
        gc.collect()
        with Ledger() as ledger, _Look(ledger, resized):
            # Each cycle's state comes and goes inside the ledger; what is there before is what the layout made.
            ledger.track(made())
            peaks = []
            for update in range(2 * optimizer.num_groups):
                torch.manual_seed(1000 * update + rank)
                batch = real_batch(request, model.config)
                ledger.track(resized())
                ledger.reset_peak()
                step(batch)
                peaks.append(ledger.peak.device)
    return peaks[optimizer.num_groups :]


def host_bytes_on_rank(rank: int, num_ranks: int, requests: list[PlanRequest], config: Any = LLAMA) -> list[int]:
    """The most bytes of state and gradients in host memory after an update of each run, in two cycles."""
    return [_host_bytes(request, config) for request in requests]


def _host_bytes(request: PlanRequest, config: Any) -> int:
    own = StateCount()
    model = real_model(request, config)
    optimizer: Any = real_optimizer(request, model)
    with _layout(request, model, optimizer) as (step, _, _):
        found = []
        for _ in range(2 * optimizer.num_groups * request.steps_per_group):
            step(real_batch(request, model.config))
            found.append(own.num_bytes()["host"])
    return max(found)


def _sparse_peaks(rank: int, request: PlanRequest, model: nn.Module, optimizer: Any) -> list[int]:
    """The bytes alive at SFT's peak inside of its first estimation phase, and outside in as many updates after it."""
    adam._corrections.cache_clear()
    with _layout(request, model, optimizer) as (step, resized, made):
        gc.collect()
        with Ledger() as ledger, _Look(ledger, resized):
            ledger.track(made())
            optimizer.claim_state()
            peaks = []
            for update in range(2 * request.estimation_steps):
                torch.manual_seed(1000 * update + rank)
                batch = real_batch(request, model.config)
                ledger.reset_peak()
                step(batch)
                peaks.append(ledger.peak.device)
    return [max(peaks[: request.estimation_steps]), max(peaks[request.estimation_steps :])]


_Step = Callable[[dict[str, torch.Tensor]], None]
_Tensors = Callable[[], list[torch.Tensor]]
_Made = tuple[_Step, _Tensors, _Tensors]


def _layout(request: PlanRequest, model: nn.Module, optimizer: Any) -> AbstractContextManager[_Made]:
    if request.layout == "ddp":
        return _accelerated(on_ranks(), model, optimizer)
    if request.layout == "fsdp2":
        return _accelerated(on_fsdp2_ranks(), model, optimizer)
    return _on_zero(request, model, optimizer)


@contextmanager
def _accelerated(ranks: AbstractContextManager[Any], model: nn.Module, optimizer: Any) -> Iterator[_Made]:
    with ranks as accelerator:
        prepared, stepped = slivertune.prepare(accelerator, model, optimizer)

        def step(batch: dict[str, torch.Tensor]) -> None:
            accelerator.backward(prepared(**batch).loss)
            stepped.step()
            stepped.zero_grad()

        def made() -> list[torch.Tensor]:
            return [*[getattr(each, "_local_tensor", each) for each in prepared.parameters()], *prepared.buffers()]

        yield step, lambda: _gathered(prepared), made


def _gathered(model: nn.Module) -> list[torch.Tensor]:
    """What FSDP2 gathers weights into."""
    found = []
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", None)
        group = None if state is None else state()._fsdp_param_group
        for each in () if group is None else group.fsdp_params:
            found += list(each.all_gather_outputs)
    return found


@contextmanager
def _on_zero(request: PlanRequest, model: nn.Module, optimizer: Any) -> Iterator[_Made]:
    quiet()
    engine, *_ = initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": request.batch_size,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "bf16": {"enabled": request.precision == "mixed_hi"},
            "zero_optimization": {
                "stage": int(request.layout.removeprefix("zero")),
                "reduce_bucket_size": model.config.hidden_size**2,
                "stage3_prefetch_bucket_size": int(0.9 * model.config.hidden_size**2),
                "stage3_param_persistence_threshold": 10 * model.config.hidden_size,
            },
        },
    )

    def step(batch: dict[str, torch.Tensor]) -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    yield step, list, lambda: _made_by_zero(engine, model)
    engine.destroy()


def _made_by_zero(engine: Any, model: nn.Module) -> list[torch.Tensor]:
    """Flat weights, masters and buffers that DeepSpeed's optimizers made before the ledger looked."""
    found: list[torch.Tensor] = [*model.buffers(), *model.parameters()]
    turns = getattr(engine, "hift_schedule", None)
    if turns is None:  # SFT: stage 3 keeps a rank's share beside a weight
        return [*found, *(each.ds_tensor for each in model.parameters() if hasattr(each, "ds_tensor"))]
    for group, child in turns.children.items():
        found += [master.data for master in turns.movers[group].masters]
        if turns.stage == 3:
            found += [child.lp_param_buffer, child.grad_partitions_flat_buffer]
            for bucket in child.ipg_buckets.values():
                buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
                found += [each for each in buffers if each is not None]
    return found
