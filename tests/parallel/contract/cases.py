"""What `test_equality.py` runs: each method's cases under each layout."""

from dataclasses import replace

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from slivertune.core.layout import Layout
from tests.parallel.contract.hift import CYCLE, HiFTCase
from tests.parallel.contract.runs import ZERO
from tests.parallel.contract.sft import SFTCase

WHOLE_OR_SHARDED: dict[str, HiFTCase] = {
    "fp32": HiFTCase(),
    "bf16 weights, fp32 masters": HiFTCase(dtype=torch.bfloat16),
    "bf16 weights, rounded stochastically": HiFTCase(dtype=torch.bfloat16, settings={"master": "stochastic"}),
    "three steps a group": HiFTCase(updates=3 * CYCLE + 4, settings={"steps_per_group": 3}),
    "checkpointing": HiFTCase(updates=2 * CYCLE, checkpointing=False),
    "reentrant checkpointing": HiFTCase(updates=2 * CYCLE, checkpointing=True),
    "tied embeddings": HiFTCase(updates=2 * CYCLE, tied=True),
    "small pieces": HiFTCase(updates=2 * CYCLE, dtype=torch.bfloat16, settings={"stream_bytes": 16_384}),
    "whole groups": HiFTCase(updates=2 * CYCLE, dtype=torch.bfloat16, settings={"stream_bytes": 0}),
}
CLIPPED = HiFTCase(updates=2 * CYCLE, accumulation=2, clip=0.05)
MIXED = HiFTCase(mixed_precision="bf16")


def _hift_of_zero(layout: Layout) -> dict[str, HiFTCase]:
    # With 1e-8 the first steps of Adam turn the last bit of a sum in another order (stage 3's over ranks, any over
    # micro-batches) into a step of full size, wherever a gradient is nearly zero.
    eps = 1e-4 if layout == "zero3" else 1e-8
    three_steps = replace(CLIPPED, updates=13, eps=1e-4)  # a cycle, a turn, and one update
    settings = {"layers_per_group": 2, "steps_per_group": 3}
    # DeepSpeed accumulates bf16 in fp32 from stage 2 on; stage 1 would use its BF16_Optimizer, which is refused.
    accumulates = layout != "zero1"
    streamed = HiFTCase(eps=eps, bare=True, streamed_weights=True)
    return {
        **({"partitioned from the start, weights on the CPU": streamed} if layout == "zero3" else {}),
        "fp32": HiFTCase(eps=eps),
        "bare, tied, decay split, random order, DeepSpeed's schedule": HiFTCase(
            eps=eps, bare=True, tied=True, split_decay=True, config_schedule=True, settings={"order": "random"}
        ),
        "accumulated, clipped, three steps a group, checkpointed": replace(
            three_steps, settings=settings, checkpointing=False
        ),
        "bare, accumulated, clipped, three steps a group, state on the device": replace(
            three_steps, settings={**settings, "state": "device"}, bare=True
        ),
        "bf16, checkpointed by re-entering": HiFTCase(
            eps=1e-4 if accumulates else eps,
            bare=True,
            dtype=torch.bfloat16,
            checkpointing=True,
            accumulation=1 + accumulates,
            engine={"data_types": {"grad_accum_dtype": "fp32"}} if accumulates else {},
        ),
        "bf16 under accelerate, DeepSpeed's schedule": HiFTCase(eps=eps, dtype=torch.bfloat16, config_schedule=True),
    }


HIFT: dict[Layout, dict[str, HiFTCase]] = {
    "ddp": {
        **WHOLE_OR_SHARDED,
        "accumulated, clipped": CLIPPED,
        "bf16, accumulated, clipped": replace(CLIPPED, dtype=torch.bfloat16),
        "weights on the host": replace(
            CLIPPED, dtype=torch.bfloat16, checkpointing=False, settings={"weights": "host", "resident_bytes": 0}
        ),
    },
    "fsdp2": {
        **WHOLE_OR_SHARDED,
        # At Adam's own eps a norm's last bit becomes a part of a step wherever a gradient is nearly zero.
        "accumulated, clipped": replace(CLIPPED, eps=1e-4),
        "bf16 mixed precision": MIXED,
        "bf16 mixed precision, accumulated": replace(MIXED, accumulation=2),
        "bf16 mixed precision, clipped": replace(MIXED, clip=0.05, eps=1e-3),
        "accelerate's checkpointing": HiFTCase(plugin={"activation_checkpointing": True}),
        "state on the device": HiFTCase(dtype=torch.bfloat16, settings={"state": "device"}),
        "evaluation in between": HiFTCase(evaluate=True),
        "weights on the host": HiFTCase(plugin={"cpu_offload": CPUOffloadPolicy(pin_memory=False)}),
        "rank 0 alone loads": HiFTCase(plugin={"cpu_ram_efficient_loading": True}),
    },
    **{layout: _hift_of_zero(layout) for layout in ZERO},
}
QUICK_OF_HIFT: dict[Layout, tuple[str, ...]] = {
    "ddp": (
        "bf16 weights, rounded stochastically",
        "three steps a group",
        "reentrant checkpointing",
        "bf16, accumulated, clipped",
        "weights on the host",
    ),
    "fsdp2": (
        "bf16 weights, rounded stochastically",
        "reentrant checkpointing",
        "tied embeddings",
        "accumulated, clipped",
        "bf16 mixed precision, accumulated",
        "state on the device",
        "weights on the host",
        "rank 0 alone loads",
    ),
    "zero1": ("fp32",),
    "zero2": ("bf16, checkpointed by re-entering",),
    "zero3": ("accumulated, clipped, three steps a group, checkpointed", "bf16, checkpointed by re-entering"),
}
"""What `make test` runs: most settings, alone or among others, under some layout."""

MA = "momentum"
EXACT: dict[str, SFTCase] = {
    "AG": SFTCase(),
    "AG, clipped, accumulated": SFTCase(accumulation=2, clip=2.0),
    "AG in bf16, accumulated": SFTCase(dtype=torch.bfloat16, accumulation=2),
    "AG, phases that overlap": SFTCase(interval=4, gamma=3),
    "MA": SFTCase(selection=MA),
    "MA, clipped, accumulated": SFTCase(selection=MA, accumulation=2, clip=2.0),
    "MA in bf16, accumulated": SFTCase(selection=MA, dtype=torch.bfloat16, accumulation=2),
}
"""Runs whose gradients are prescribed, so that nothing but the library's own choices can differ."""
LLAMA: dict[str, SFTCase] = {
    "AG": SFTCase(model="llama", density=0.25),
    "AG, tied, reentrant checkpoints": SFTCase(model="llama", density=0.25, tied=True, checkpointing=True, updates=11),
    "AG, checkpoints, clipped, accumulated": SFTCase(
        model="llama", density=0.4, checkpointing=False, accumulation=2, clip=0.15, updates=6
    ),
    "MA, reentrant checkpoints": SFTCase(
        model="llama", selection=MA, density=0.1, checkpointing=True, interval=3, updates=7
    ),
    "MA, tied, checkpoints, clipped, accumulated": SFTCase(
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
BF16: dict[str, SFTCase] = {
    "AG": SFTCase(model="llama", density=0.4, dtype=torch.bfloat16, updates=6),
    "MA": SFTCase(model="llama", selection=MA, density=0.1, dtype=torch.bfloat16, interval=3, updates=7),
}


_LLAMAS = {f"Llama: {name}": case for name, case in LLAMA.items()}
_BF16 = {f"Llama in bf16: {name}": case for name, case in BF16.items()}
_TIED_OR_CLIPPED = {name: case for name, case in _LLAMAS.items() if case.tied or case.clip}
SFT: dict[Layout, dict[str, SFTCase]] = {
    "ddp": {
        **EXACT,
        "AG in layers": SFTCase(settings={"form": "layer"}, accumulation=2),
        "AG, gradients that one rank lacks": SFTCase(absent=True, accumulation=2),
        "MA in layers, bf16": SFTCase(selection=MA, settings={"form": "layer"}, dtype=torch.bfloat16),
        **_LLAMAS,
        **_BF16,
    },
    "fsdp2": {
        **EXACT,
        "AG, fp32 weights gathered in bf16": SFTCase(mixed_precision="bf16", accumulation=2),
        "MA, fp32 weights gathered in bf16": SFTCase(selection=MA, mixed_precision="bf16", accumulation=2),
        **_LLAMAS,
        "Llama: AG, evaluated in between": SFTCase(model="llama", density=0.25, evaluate=True),
        **_BF16,
    },
    **{layout: {**EXACT, **_TIED_OR_CLIPPED, **_BF16} for layout in ZERO},
}
QUICK_OF_SFT: dict[Layout, tuple[str, ...]] = {
    "ddp": (
        "AG, clipped, accumulated",
        "AG, phases that overlap",
        "AG, gradients that one rank lacks",
        "MA in layers, bf16",
        "Llama: MA, tied, checkpoints, clipped, accumulated",
    ),
    "fsdp2": ("MA, clipped, accumulated", "Llama: AG, checkpoints, clipped, accumulated"),
    "zero1": ("AG, clipped, accumulated",),
    "zero2": ("MA, clipped, accumulated",),
    "zero3": ("Llama: AG, checkpoints, clipped, accumulated",),
}
"""What `make test` runs, likewise."""
