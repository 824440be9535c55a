"""What HiFT on several ranks must equal: one process that sees every rank's rows, in a plain loop.

Written without the library, over the rotation of `tests/helpers/reference.py`: every rank's gradient is computed
in turn on the same model, and the mean is taken by hand.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from tests.helpers.accelerator import one_device, pretends_cuda
from tests.helpers.models import VOCAB, Batch, tiny_llama
from tests.helpers.reference import NaiveHiFT, decay_split, naive_groups

Gradients = dict[str, torch.Tensor]
# Foreach, which is the default on a device, rounds in another way than the loop, which is the default on a CPU.
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "foreach": False}
CAP = 1e-4
"""What no limit on weights exceeds: a doubled gradient of one update changes them by 5e-3, an update more by 1e-2."""


def batch_of(update: int, micro: int, rank: int, *, rows: int = 2, length: int = 12) -> Batch:
    """The rows of one rank in one micro-batch: another draw for each, the same in every process."""
    ids = torch.randint(
        0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(10_000 * update + 100 * micro + rank)
    )
    return {"input_ids": ids, "labels": ids.clone()}


def halving(tick: int) -> float:
    """A schedule that changes with every tick, so that a learning rate read at the wrong time shows."""
    return 1.0 / (1.0 + 0.05 * tick)


class OneProcess:
    """The reference run.

    Args:
        model: Changed in place.
        groups: Parameter names of each group, in the order of their turns.
        ranks: How many ranks' batches make the whole batch.
        accumulation: Micro-batches of an update.
        max_norm: Clips the mean gradient.
        steps_per_group: Updates in a turn.
        lr_of: The schedule's factor after so many updates; when None, it is halved as by accelerate's wrapper of a
            scheduler, which ticks once a rank.
        compute_dtype: Forward and backward run on a copy of the weights in this dtype, as FSDP2's mixed precision does.
        as_zero: Whether each micro-batch is averaged over the ranks by itself, and summed in fp32.
        scales: What the losses of each update are multiplied by; gradients in fp16 depend on it.
        split_decay: Whether vectors don't decay.
        master: As in `NaiveHiFT`.
        options: AdamW's arguments.
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
        lr_of: Callable[[int], float] | None = None,
        compute_dtype: torch.dtype | None = None,
        as_zero: bool = False,
        scales: Sequence[float] | None = None,
        split_decay: bool = False,
        master: str = "fp32",
        make_batch: Callable[..., Batch] = batch_of,
        **options: Any,
    ) -> None:
        self.model = model.requires_grad_(True)
        options = {**ADAMW, **options}
        self.rotation = NaiveHiFT(
            model,
            torch.optim.AdamW,
            groups=groups,
            steps_per_group=steps_per_group,
            master=master,
            split=decay_split(model, options["weight_decay"]) if split_decay else None,
            **options,
        )
        self.groups, self.masters = self.rotation.groups, self.rotation.masters
        self.ranks = ranks
        self.accumulation = accumulation
        self.max_norm = max_norm
        self.compute_dtype = compute_dtype
        self.as_zero = as_zero
        self.scales = scales
        self.make_batch = make_batch
        self.batches = self.updates = 0
        self.skipped: dict[int, int] = {}
        """Turns of each group in which no batch reached it."""
        self.lr_of = lr_of or (lambda updates: halving(updates * ranks))
        self.norms: list[float] = []
        self.losses: list[float] = []
        """The mean of each update's."""

    def run(self, until: int, *, skip: Sequence[int] = ()) -> OneProcess:
        """Train until so many batches are done; at those in `skip` (an overflow) nothing is applied."""
        for batch in range(self.batches, until):
            gradients = self.mean_gradients(batch, [*self.rotation.active, *self.rotation.names_above])
            if not gradients:
                active = self.groups.index(self.rotation.active)
                self.skipped[active] = self.skipped.get(active, 0) + 1
                self.rotation.updates += 1  # a turn passes also where nobody had a gradient
            elif batch not in skip:
                self.apply(gradients)
            self.batches += 1
        return self

    def mean_gradients(self, batch: int, names: Sequence[str]) -> Gradients:
        """The mean over the ranks of what each accumulates."""
        scale = self.scales[batch] if self.scales is not None else 1.0
        self.losses.append(0.0)
        found = [
            [self._gradients(self.make_batch(batch, micro, rank), scale) for micro in range(self.accumulation)]
            for rank in range(self.ranks)
        ]
        if self.as_zero:
            means = [_sum([_divided(each, self.ranks) for each in ranks], names) for ranks in zip(*found, strict=True)]
            return _sum([{name: each.float() / scale for name, each in mean.items()} for mean in means], names)
        return _sum([_divided(_sum(micros, names), self.ranks * scale) for micros in found], names)

    def _gradients(self, batch: Batch, scale: float) -> Gradients:
        weights = dict(self.model.named_parameters())
        originals = {name: weight.data for name, weight in weights.items()}
        if self.compute_dtype is not None:
            for weight in weights.values():
                weight.data = weight.data.to(self.compute_dtype)
        self.model.zero_grad()
        loss = self.model(**send_to_device(batch, next(self.model.parameters()).device)).loss
        (loss.float() / self.accumulation * scale).backward()
        self.losses[-1] += loss.item() / (self.accumulation * self.ranks)
        found = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        for name, weight in weights.items():
            weight.grad = None
            weight.data = originals[name]
        return found

    def apply(self, gradients: Gradients) -> None:
        """Make one update of the active group from its mean gradients."""
        for group in self.rotation.carrier.param_groups:
            group["lr"] = self.rotation.options["lr"] * self.lr_of(self.updates)
        # Clipped as the weight's own gradient, in its dtype, as a training loop does.
        weights = dict(self.model.named_parameters())
        held = {}
        for name, gradient in gradients.items():
            held[name] = torch.empty_like(gradient if self.as_zero else weights[name])
            held[name].grad = gradient.to(held[name].dtype)
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(held.values(), self.max_norm or math.inf)))
        self.rotation.step({name: each.grad for name, each in held.items()})
        self.updates += 1


def _divided(gradients: Gradients, count: int) -> Gradients:
    return {name: gradient / count for name, gradient in gradients.items()}


def _sum(parts: Sequence[Gradients], names: Sequence[str]) -> Gradients:
    having = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: functools.reduce(torch.add, gradients) for name, gradients in having.items() if gradients}


def after_two_ranks(
    num_ranks: int, updates: int, dtype: torch.dtype = torch.float32, *, is_bare: bool = False, **options: Any
) -> dict[str, torch.Tensor]:
    """Weights of a tiny Llama after seven updates on two ranks' rows and more on those of so many ranks.

    Args:
        num_ranks: The ranks that go on.
        updates: All of them.
        dtype: Of the model.
        is_bare: Whether the schedule ticks once in an update; else once for each rank, and its own count was saved.
        options: Of `OneProcess`.
    """
    model = tiny_llama(dtype)
    first, later = (1, 1) if is_bare else (2, num_ranks)

    def rate(done: int) -> float:
        return halving(first * min(done, 7) + later * max(done - 7, 0))

    reference = OneProcess(model, naive_groups(model, 1), ranks=2, lr_of=rate, **options).run(7)
    reference.ranks = num_ranks
    return whole_weights(reference.run(updates).model)


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference between tensors of the same names."""
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    return max(float((left[name].float() - right[name].float()).abs().max()) for name in left if left[name].numel())


on_ranks = one_device
"""An Accelerator over the process group that is there."""


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
    """A copy of every parameter by its plain name, gathered where it is sharded; every rank asks together."""
    return {
        re.sub(r"^module\.|_checkpoint_wrapped_module\.", "", name): whole(parameter)
        for name, parameter in model.named_parameters()
    }


def whole(parameter: Any) -> torch.Tensor:
    """A copy of a parameter on the CPU, gathered where it is sharded; every rank asks together."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return torch.clone(parameter.detach()).cpu()
    value = parameter.detach().to("cuda" if pretends_cuda() else "cpu")  # where its ranks can exchange it
    return torch.clone(value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
