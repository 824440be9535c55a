"""HiFT written as plainly as it can be: a dense model, one ordinary optimizer per group, only the active one stepped.

Nothing here is shared with the package. The whole model computes every gradient; gradients of inactive groups are
thrown away; masters are whole fp32 copies that never leave memory.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.optimization import Adafactor

from tests.helpers.models import Batch

Split = list[tuple[list[str], dict[str, Any]]]
"""Parameter groups of an optimizer: names, and the options that differ from the defaults."""


def naive_layer(name: str) -> int:
    """Layer of a parameter of the tiny models, by its name: 0 embedding, 1.. blocks, -1 head."""
    block = re.search(r"(?:layers|layer|h)\.(\d+)\.", name)
    if block is not None:
        return int(block.group(1)) + 1
    if re.search(r"embed_tokens|embeddings|wte|wpe", name):
        return 0
    return -1


def naive_groups(model: nn.Module, layers_per_group: int) -> list[list[str]]:
    """Parameter names per group, cut from the bottom every `layers_per_group` layers."""
    by_layer: dict[int, list[str]] = {}
    for name, _ in model.named_parameters():
        by_layer.setdefault(naive_layer(name), []).append(name)
    # A tied head that has no norm of its own would leave no head layer; the tiny models all have a final norm.
    layers = [by_layer[index] for index in [*range(max(by_layer) + 1), -1]]
    return [
        [name for layer in layers[index * layers_per_group : (index + 1) * layers_per_group] for name in layer]
        for index in range(math.ceil(len(layers) / layers_per_group))
    ]


def decay_split(model: nn.Module, decay: float = 0.1) -> Split:
    """The usual two parameter groups: matrices decay, vectors do not."""
    return [
        ([name for name, parameter in model.named_parameters() if parameter.ndim >= 2], {"weight_decay": decay}),
        ([name for name, parameter in model.named_parameters() if parameter.ndim < 2], {"weight_decay": 0.0}),
    ]


def grouped_optimizer(model: nn.Module, optimizer_class: type, split: Split, **options: Any) -> torch.optim.Optimizer:
    """An ordinary optimizer over the model with the parameter groups of `split`."""
    parameters = dict(model.named_parameters())
    return optimizer_class(
        [{"params": [parameters[name] for name in names], **extra} for names, extra in split], **options
    )


class NaiveHiFT:
    """The reference.

    Args:
        model: Dense model; all its parameters keep `requires_grad`.
        optimizer_class: Class of the plain optimizers.
        groups: Parameter names per group.
        order: Group indices in the order of one cycle.
        steps_per_group: Updates before the next group's turn.
        discard: Whether a group's optimizer and masters are made anew whenever its turn begins.
        master: `fp32` for optimizers that work on fp32 copies, `none` on copies in the weights' own dtype, `stochastic`
            on fp32 copies that each step makes of bf16 weights and rounds again.
        seed: Seed of that rounding.
        above: Share of the learning rate at which groups above the active one take Adafactor's first step. None: they
            stay.
        split: Parameter groups; one with every parameter when None.
        options: Keyword arguments of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        groups: Sequence[Sequence[str]],
        order: Sequence[int] | None = None,
        steps_per_group: int = 1,
        discard: bool = False,
        master: str = "fp32",
        seed: int = 0,
        above: float | None = None,
        split: Split | None = None,
        **options: Any,
    ) -> None:
        self.parameters = dict(model.named_parameters())
        self.optimizer_class = optimizer_class
        self.options = options
        self.groups = [list(group) for group in groups]
        self.order = list(order) if order is not None else list(range(len(groups)))
        self.steps_per_group = steps_per_group
        self.cycle_length = len(self.groups) * steps_per_group
        self.discard = discard
        self.master = master
        self.seed = seed
        self.above = above
        self.split: Split = split if split is not None else [(list(self.parameters), {})]
        self.updates = 0
        self.held: list[Any] = []
        self.inner: dict[int, torch.optim.Optimizer] = {}
        self.masters: dict[str, torch.Tensor] = {}
        # Schedulers drive this optimizer's options; it has no gradient, so its step changes nothing.
        self.carrier = optimizer_class(
            [{"params": [nn.Parameter(torch.zeros(1))], **e} for _, e in self.split], **options
        )

    @property
    def active_index(self) -> int:
        return self.order[self.updates // self.steps_per_group % len(self.groups)]

    @property
    def active(self) -> list[str]:
        return self.groups[self.active_index]

    @property
    def names_above(self) -> list[str]:
        """Parameters that step beside the active group."""
        above = [] if self.above is None else self.groups[self.active_index + 1 :]
        return [name for group in above for name in group]

    def keep_active_gradients(self) -> None:
        """Throw away what HiFT would never have computed."""
        kept = {*self.active, *self.names_above}
        for name, parameter in self.parameters.items():
            if name not in kept:
                parameter.grad = None

    def step(self, gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """Update the active group; from the parameters' own gradients when no others are given."""
        if gradients is None:
            gradients = {name: each.grad for name, each in self.parameters.items() if each.grad is not None}
        if self.updates % self.cycle_length == 0 or not any(self.held):
            self.held = [_copied(group["lr"]) for group in self.carrier.param_groups]
        inner = self._optimizer_of_active_group()
        for name in self.active:
            master = self.masters[name]
            if self.is_rounded(name) or self.above is not None:
                master.data.copy_(self.parameters[name])
            master.grad = gradients[name].to(master.dtype) if name in gradients else None
        for group in inner.param_groups:
            index = group["split_index"]
            carried = self.carrier.param_groups[index]
            group.update({key: carried[key] for key in ("betas", "momentum") if key in carried})
            group["lr"] = _copied(self.held[index])
        inner.step()
        with torch.no_grad():
            for name in self.active:
                stepped = self.masters[name]
                if self.is_rounded(name):
                    stepped = naive_rounding(stepped, self.seed, self.updates, name)
                self.parameters[name].copy_(stepped)
        for name in self.names_above:
            if name in gradients:
                self.step_above(name, gradients[name])
        self.zero_grad()
        self.carrier.step()
        self.updates += 1

    def step_above(self, name: str, gradient: torch.Tensor) -> None:
        """Let a new Adafactor take one step."""
        assert self.above is not None
        rate = next(self.held[index] for index, (names, _) in enumerate(self.split) if name in names)
        stepped = nn.Parameter(self.parameters[name].detach().float().clone())
        stepped.grad = gradient.float()
        Adafactor([stepped], lr=self.above * float(rate), scale_parameter=False, relative_step=False).step()
        rounded = naive_rounding(stepped, self.seed, self.updates, name) if self.is_rounded(name) else stepped
        self.parameters[name].data.copy_(rounded)

    def is_rounded(self, name: str) -> bool:
        return self.master == "stochastic" and self.parameters[name].dtype == torch.bfloat16

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _optimizer_of_active_group(self) -> torch.optim.Optimizer:
        index = self.active_index
        fresh_turn = self.updates % self.steps_per_group == 0
        if index in self.inner and not (self.discard and fresh_turn):
            return self.inner[index]
        members = set(self.groups[index])
        groups = []
        for split_index, (names, extra) in enumerate(self.split):
            chosen = [name for name in names if name in members]
            for name in chosen:
                weight = self.parameters[name].detach()
                self.masters[name] = nn.Parameter((weight if self.master == "none" else weight.float()).clone())
            if chosen:
                groups.append({"params": [self.masters[name] for name in chosen], **extra, "split_index": split_index})
        self.inner[index] = self.optimizer_class(groups, **self.options)
        return self.inner[index]


def naive_rounding(values: torch.Tensor, seed: int, update: int, name: str) -> torch.Tensor:
    """Round to bf16, up with the probability of the distance from the number below, by a hash of 32-bit integers."""
    key = int.from_bytes(hashlib.blake2b(f"{seed} {update} {name}".encode(), digest_size=4).digest(), "little")
    hashed = (np.arange(values.numel(), dtype=np.uint64) * 0x9E3779B1 + key) % 2**32
    signs = (hashed >> 31) * 0xFFFF0000  # a shift of a signed number repeats its sign
    hashed = (hashed ^ (hashed >> 16) ^ signs) * 0x735A2D97 % 2**32 >> 16
    flat = values.detach().cpu().reshape(-1)
    exact = flat.double().numpy()
    shown = flat.numpy().view(np.uint32)
    below = (shown & 0xFFFF0000).view(np.float32).astype(np.float64)  # the neighbours, by magnitude
    above = ((shown & 0xFFFF0000) + 0x10000).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        goes_up = hashed + np.abs(exact - below) / np.abs(above - below) * 2**16 >= 2**16
    goes_up &= np.isfinite(exact) & np.isfinite(above)
    rounded = np.where(np.isfinite(exact), np.where(goes_up, above, below), exact)
    return torch.from_numpy(rounded.astype(np.float32)).view(values.shape).bfloat16()


def quantized_by_hand(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Quantise a weight by blocks of 64 and dequantise it, row by row for int8."""
    if form == "exact":
        return weight.clone()
    if form == "nf4":
        import bitsandbytes.functional

        codes, state = bitsandbytes.functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        return bitsandbytes.functional.dequantize_4bit(codes, state)
    blocks = nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scales = (blocks.float().abs().amax(dim=1, keepdim=True) / 127).to(weight.dtype)
    codes = torch.round(blocks.float() / scales.float()).to(weight.dtype)
    return (codes * scales).flatten()[: weight.numel()].view(weight.shape)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def train(
    model: nn.Module,
    optimizer: Any,
    batches: Sequence[Batch],
    steps: int,
    *,
    start: int = 0,
    accumulation: int = 1,
    max_norm: float | None = None,
    scheduler: Any = None,
    after_step: Callable[[int], None] | None = None,
) -> list[float]:
    """An ordinary training loop, the same for HiFT, for its base optimizer and for the reference.

    Args:
        start: Number of updates done before, so that a resumed run sees the batches it would have seen.
        after_step: Called with the number of updates done, after the scheduler has ticked.

    Returns:
        The loss of every micro-batch.
    """
    losses = []
    for update in range(start, start + steps):
        for micro in range(accumulation):
            loss = model(**batches[(update * accumulation + micro) % len(batches)]).loss / accumulation
            loss.backward()
            losses.append(loss.item())
        if isinstance(optimizer, NaiveHiFT):
            optimizer.keep_active_gradients()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert norm > max_norm, f"gradient norm {norm} is below {max_norm}: clipping would not be tested"
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(update + 1)
    return losses


@contextmanager
def shapes_stepped(optimizer_class: type) -> Iterator[list[torch.Size]]:
    """Record the shape of every tensor that an optimizer of exactly this class is asked to update.

    All-zero tensors with all-zero gradients are not weights of a model (a trial step, say) and do not count.
    """
    seen: list[torch.Size] = []

    def record(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if type(optimizer) is optimizer_class:
            seen.extend(
                p.shape
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None and (p.any() or p.grad.any())
            )

    handle = register_optimizer_step_pre_hook(record)
    try:
        yield seen
    finally:
        handle.remove()
