"""What HiFT on several ranks must equal: one process that sees every rank's rows, in a plain loop.

Written without the library: plain optimizers over plain copies of the weights, one a group; every rank's gradient is
computed in turn on the same model, and the mean is taken by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.helpers.models import VOCAB, Batch, tiny_llama
from tests.helpers.reference import naive_groups

Gradients = dict[str, torch.Tensor]
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CAP = 1e-4
"""What no limit on weights exceeds: a doubled gradient of one update changes them by 5e-3, an update more by 1e-2."""


def batch_of(update: int, micro: int, rank: int, *, rows: int = 2, length: int = 12) -> Batch:
    """The rows of one rank in one micro-batch: another draw for each, the same in every process."""
    generator = torch.Generator().manual_seed(10_000 * update + 100 * micro + rank)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def halving(tick: int) -> float:
    """A schedule that changes with every tick, so that a learning rate read at the wrong time shows."""
    return 1.0 / (1.0 + 0.05 * tick)


class OneProcess:
    """The reference run.

    Args:
        model: Changed in place.
        groups: Parameter names of each group, bottom first.
        ranks: How many ranks' batches make the whole batch.
        accumulation: Micro-batches of an update.
        max_norm: Clips the mean gradient.
        steps_per_group: Updates in a turn.
        ticks_per_update: How often accelerate's wrapper of a scheduler ticks in an update: once a rank.
        compute_dtype: Forward and backward run on a copy of the weights in this dtype, as FSDP2's mixed precision does.
        sum_dtype: Gradients are averaged in this dtype.
        optimizer_class: Of the plain optimizers.
        options: Their arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Sequence[str]],
        *,
        ranks: int,
        accumulation: int = 1,
        max_norm: float | None = None,
        steps_per_group: int = 1,
        ticks_per_update: int | None = None,
        compute_dtype: torch.dtype | None = None,
        sum_dtype: torch.dtype | None = None,
        make_batch: Callable[..., Batch] = batch_of,
        optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        self.model = model.requires_grad_(True)
        self.groups = [list(names) for names in groups]
        self.ranks = ranks
        self.accumulation = accumulation
        self.max_norm = max_norm
        self.steps_per_group = steps_per_group
        self.ticks_per_update = ranks if ticks_per_update is None else ticks_per_update
        self.compute_dtype = compute_dtype
        self.sum_dtype = sum_dtype
        self.make_batch = make_batch
        self.options = {**ADAMW, **options}
        weights = dict(model.named_parameters())
        # The master of an fp32 weight is a copy as well: it must come out the same.
        self.masters = {name: nn.Parameter(weight.detach().float().clone()) for name, weight in weights.items()}
        self.optimizers = [
            optimizer_class([self.masters[name] for name in names], **self.options) for names in self.groups
        ]
        self.updates = 0
        self.lr_of: Callable[[int], float] = lambda updates: halving(updates * self.ticks_per_update)
        self.lr = self.options["lr"]
        self.norms: list[float] = []

    def run(self, until: int, *, skip: Sequence[int] = ()) -> OneProcess:
        """Train until so many batches are done; at those in `skip` (an overflow) nothing is applied."""
        for batch in range(self.updates, until):
            names = self.groups[self.updates // self.steps_per_group % len(self.groups)]
            gradients = self.mean_gradients(batch, names)
            if batch in skip:
                continue
            self._apply(names, gradients)
        return self

    def mean_gradients(self, batch: int, names: Sequence[str]) -> Gradients:
        """The mean over the ranks of what each accumulates."""
        summed: Gradients = {}
        for rank in range(self.ranks):
            mine: Gradients = {}
            for micro in range(self.accumulation):
                found = self._gradients(self.make_batch(batch, micro, rank))
                for name in names:
                    mine[name] = mine[name] + found[name] if name in mine else found[name]
            for name in names:
                share = mine[name] / self.ranks
                summed[name] = summed[name] + share if name in summed else share
        return summed

    def _gradients(self, batch: Batch) -> Gradients:
        weights = dict(self.model.named_parameters())
        originals = {name: weight.data for name, weight in weights.items()}
        if self.compute_dtype is not None:
            for weight in weights.values():
                weight.data = weight.data.to(self.compute_dtype)
        self.model.zero_grad()
        (self.model(**batch).loss / self.accumulation).backward()
        found = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        for name, weight in weights.items():
            weight.grad = None
            weight.data = originals[name]
        return {name: each.to(self.sum_dtype or each.dtype) for name, each in found.items()}

    def _apply(self, names: Sequence[str], gradients: Gradients) -> None:
        cycle = len(self.groups) * self.steps_per_group
        if self.updates % cycle == 0:
            self.lr = self.options["lr"] * self.lr_of(self.updates)
        weights = dict(self.model.named_parameters())
        index = self.updates // self.steps_per_group % len(self.groups)
        for name in names:
            # Clipped as the weight's own gradient, in its dtype, as a training loop does.
            weights[name].grad = gradients[name].to(weights[name].dtype)
        if self.max_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_([weights[name] for name in names], self.max_norm))
            self.norms.append(norm)
        for name in names:
            gradient = weights[name].grad
            assert gradient is not None
            self.masters[name].grad = gradient.float()
        for group in self.optimizers[index].param_groups:
            group["lr"] = self.lr
        self.optimizers[index].step()
        with torch.no_grad():
            for name in names:
                weights[name].copy_(self.masters[name])
                weights[name].grad = None
        self.updates += 1


def after_two_ranks(num_ranks: int, updates: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Weights of a tiny Llama after seven updates on two ranks' rows and more on those of so many ranks."""
    model = tiny_llama(dtype)
    reference = OneProcess(model, naive_groups(model, 1), ranks=2).run(7)
    reference.ranks = num_ranks
    # The scheduler's own count was saved: two ticks in each of seven updates; each rank ticks once more from here on.
    reference.lr_of = lambda done: halving(14 + num_ranks * (done - 7) if done > 7 else 2 * done)
    reference.run(updates)
    return whole_weights(model)


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference between tensors of the same names."""
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    return max(float((left[name].float() - right[name].float()).abs().max()) for name in left if left[name].numel())


@contextmanager
def on_ranks(**options: Any) -> Iterator[Any]:
    """An Accelerator over the process group that is there; accelerate's shared state is forgotten before and after."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    try:
        yield Accelerator(cpu=True, **options)
    finally:
        forget()


@contextmanager
def on_fsdp2_ranks(
    *, mixed_precision: str = "no", plugin: dict[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """An Accelerator under FSDP2. Accelerate never selects it on CPUs, so its choice is overwritten here."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    choices: dict[str, Any] = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
        "reshard_after_forward": True,
        **(plugin or {}),
    }
    made = FullyShardedDataParallelPlugin(**choices)
    if mixed_precision != "no":
        made.set_mixed_precision(mixed_precision)
    with on_ranks(mixed_precision=mixed_precision, **options) as accelerator:
        # In both: whoever makes another AcceleratorState copies the PartialState's choice over it.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = made
        yield accelerator


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter by its plain name, gathered where it is sharded."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): getattr(parameter.detach(), "full_tensor", parameter.clone)()
        .detach()
        .clone()
        for name, parameter in model.named_parameters()
    }
