"""The ways of training that `curve_measured.py` times: HiFT, and what a user would take instead.

All train a causal Llama in bf16 with random weights, with activation checkpointing and the loss in chunks (but for
ZeRO-3), by AdamW.
`make_update` turns one of `WAYS` into a function that makes an update of some micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llama import LlamaSizes, build_llama, quantize_linears
from torch import nn

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing

Batch = dict[str, torch.Tensor]
Update = Callable[[Sequence[Batch]], torch.Tensor]
"""Makes an update of micro-batches as large as each other; the loss of the last."""
RATE = 1e-5
_INTERVAL = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way of training."""

    title: str
    make: Callable[[nn.Module, int], tuple[Update, int]]
    """Of a model and the micro-batches of an update: makes updates; and how many of them repeat themselves."""
    needs_cuda: bool = False
    has_chunked_loss: bool = True
    """Not under ZeRO-3, which puts a forward of its own over the head's."""
    starts_on_host: bool = False
    """Whether the model is made in host memory, from which the way takes it to the device itself."""


def make_update(way: Way, sizes: LlamaSizes, num_micro_batches: int, device: torch.device) -> tuple[Update, int]:
    """Make the model and what trains it.

    Args:
        way: Of `WAYS`.
        sizes: Of the model.
        num_micro_batches: Of an update.
        device: Where it trains.

    Returns:
        The function that makes an update; how many updates repeat themselves: HiFT's cycle, SFT's interval.
    """
    place = torch.device("cpu") if way.starts_on_host else device
    model = build_llama(sizes, dtype=torch.bfloat16, device=place, seed=0)
    enable_checkpointing(model, {"use_reentrant": False})
    if way.has_chunked_loss:
        st.attach_chunked_cross_entropy(model)
    return way.make(model, num_micro_batches)


def _plain(model: nn.Module, optimizer: Any) -> Update:
    def update(batches: Sequence[Batch]) -> torch.Tensor:
        for batch in batches:
            loss: torch.Tensor = model(**batch).loss / len(batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return update


def _hift(**settings: Any) -> Callable[[nn.Module, int], tuple[Update, int]]:
    def make(model: nn.Module, num_micro_batches: int) -> tuple[Update, int]:
        settings["layers_per_group"] = min(settings["layers_per_group"], len(st.find_layers(model)))  # of a tiny one
        optimizer = st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(**settings), lr=RATE)
        return _plain(model, optimizer), optimizer.num_groups

    return make


def _sft(model: nn.Module, num_micro_batches: int) -> tuple[Update, int]:
    config = st.SFTConfig(equivalent_lora_rank=rank_of(model), reselection_interval=_INTERVAL)
    return _plain(model, st.SFT(model, config=config, lr=RATE, total_steps=1000)), _INTERVAL


def rank_of(model: nn.Module) -> int:
    """Return 64, or what a tiny model bounds it to."""
    return int(min(64, model.config.hidden_size // 4))


def add_lora(model: nn.Module) -> torch.optim.Optimizer:
    """Put adapters on all linear layers of a model, in their places, and return AdamW over them."""
    from peft import LoraConfig, get_peft_model

    rank = rank_of(model)
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))  # type: ignore[arg-type]
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=RATE)


def _lora(model: nn.Module, num_micro_batches: int) -> tuple[Update, int]:
    return _plain(model, add_lora(model)), 1


def _qlora(model: nn.Module, num_micro_batches: int) -> tuple[Update, int]:
    quantize_linears(model)
    return _lora(model, num_micro_batches)


def _paged(model: nn.Module, num_micro_batches: int) -> tuple[Update, int]:
    from bitsandbytes.optim import PagedAdamW32bit

    return _plain(model, PagedAdamW32bit(model.parameters(), lr=RATE)), 1


def _torchao(model: nn.Module, num_micro_batches: int) -> tuple[Update, int]:
    from torchao.optim import CPUOffloadOptimizer

    # It can't hand gradients over while they are accumulated.
    is_one = num_micro_batches == 1
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=is_one, lr=RATE)
    return _plain(model, optimizer), 1


def _zero(stage: int) -> Callable[[nn.Module, int], tuple[Update, int]]:
    def make(model: nn.Module, num_micro_batches: int) -> tuple[Update, int]:
        import deepspeed

        host = {"device": "cpu", "pin_memory": True}
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": host}
        if stage == 3:
            zero["offload_param"] = host
        config = {
            "train_micro_batch_size_per_gpu": 1,  # rows are not counted by anything that is timed
            "gradient_accumulation_steps": num_micro_batches,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

        def update(batches: Sequence[Batch]) -> torch.Tensor:
            for batch in batches:
                loss: torch.Tensor = engine(**batch).loss
                engine.backward(loss)
                engine.step()
            return loss.detach()

        return update, 1

    return make


WAYS = {
    **{f"m{m}": Way(title=f"HiFT, m = {m}", make=_hift(layers_per_group=m)) for m in (1, 2, 4, 5, 8, 9)},
    "m17": Way(title="HiFT, m = 17, gradients on the host", make=_hift(layers_per_group=17, gradients="host")),
    "all": Way(title="HiFT, all layers, gradients on the host", make=_hift(layers_per_group=1000, gradients="host")),
    "sft": Way(title="SFT (AG), as LoRA r 64", make=_sft),
    "lora": Way(title="LoRA, r 64", make=_lora),
    "qlora": Way(title="QLoRA, r 64", make=_qlora),
    "paged": Way(title="bitsandbytes' paged AdamW", make=_paged, needs_cuda=True),
    "torchao": Way(title="torchao's offloaded AdamW", make=_torchao, needs_cuda=True),
    "zero2": Way(title="ZeRO-Offload (stage 2)", make=_zero(2)),
    "zero3": Way(title="ZeRO-3, all on the host", make=_zero(3), has_chunked_loss=False, starts_on_host=True),
}
