"""What one commit of slivertune computes, for `same_bits.py`: the losses and final weights of every cell, to the bit.

Imports whatever slivertune the path has, and uses public names alone, so that it runs on older and newer commits alike.
"""

import argparse
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

import faults  # imports what the runs need; they are forks of this process
import faults_run
import torch
from accelerators import make_accelerator
from faults_run import CPU, bytes_digest, join, report
from llama import build_llama, quantize_linears, random_batch
from peft import LoraConfig, get_peft_model

import slivertune as st

LAYOUTS = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
UPDATES = 11
"""Two cycles of HiFT's five groups and more; reselections of SFT after 2 and 5 updates."""
SIZES = replace(faults_run.SIZES, blocks=3)
"""Three blocks, so that one has to be streamed: `weights="host"` has slots for two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """How one cell trains."""

    method: str = "dense"
    """"hift", "sft", or "dense" for AdamW over everything that requires gradients."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the method's config."""
    in_4_bits: bool = False
    """Whether the linear layers of the blocks are nf4, and frozen."""
    lora: bool = False
    tokentune: bool = False
    accumulation: int = 2
    """Micro-batches per update."""
    clips: bool = True


def hift(**settings: Any) -> Cell:
    """Make a cell of HiFT; stepped gradients can't be clipped."""
    return Cell(method="hift", settings=settings, clips=settings.get("gradients") != "stepped")


def sft(**settings: Any) -> Cell:
    return Cell(method="sft", settings=settings)


METHODS: dict[str, Cell] = {
    "hift": hift(),
    "hift_top2down": hift(order="top2down"),
    "hift_random": hift(order="random", layers_per_group=2, steps_per_group=2),
    "hift_no_master": hift(master="none"),
    "hift_prefetch": hift(prefetch_bytes=2**20, stream_bytes=4096, steps_per_group=2),
    "hift_host_gradients": hift(gradients="host", layers_per_group=2, stream_bytes=4096),
    "hift_stepped": hift(gradients="stepped"),
    "hift_stepped_unaccumulated": replace(hift(gradients="stepped", stream_bytes=4096), accumulation=1),
    "hift_device": hift(state="device"),
    "hift_disk": hift(state="disk", stream_bytes=4096),
    "hift_disk_stepped": hift(state="disk", gradients="stepped", state_ram_bytes=2**18),
    "hift_discard": hift(state="discard", steps_per_group=2),
    "hift_int8": hift(waiting="int8"),
    "hift_nf4": hift(waiting="nf4", steps_per_group=2),
    "hift_host_weights": hift(weights="host"),
    "hift_host_codes": hift(weights="host", waiting="int8", gradients="host"),
    "hift_unaccumulated": replace(hift(), accumulation=1),
    "sft": sft(),
    "sft_ma": sft(selection="momentum"),
    "sft_packed": sft(packed=True),
    "sft_layer": sft(form="layer"),
    "sft_4bit": replace(sft(), in_4_bits=True),
    "sft_unaccumulated": replace(sft(), accumulation=1),
    "lora": Cell(lora=True),
    "lora_4bit": Cell(lora=True, in_4_bits=True),
    "tokentune_dense": Cell(tokentune=True),
    "tokentune_hift": replace(hift(), tokentune=True),
    "tokentune_sft": replace(sft(), tokentune=True),
    "tokentune_lora": Cell(lora=True, tokentune=True),
    "tokentune_unaccumulated": Cell(tokentune=True, accumulation=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="JSON file of the results")
    parser.add_argument("--source", type=Path, required=True, help="folder that slivertune must come from")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    if not Path(st.__file__).resolve().is_relative_to(options.source.resolve()):
        raise SystemExit(f"slivertune was imported from {Path(st.__file__).parent}, not from {options.source}")
    found = {}
    for layout in options.layouts:
        for method in options.methods:
            found[f"{layout} {method}"] = run_cell(layout, METHODS[method])
    options.output.write_text(json.dumps(found), encoding="utf-8")


def run_cell(layout: str, cell: Cell) -> list[dict[str, Any]]:
    """Return what each rank came to; "refused" is there if the layout does not support the method."""
    ended = faults.fork(1 if layout == "single" else 2, work, layout, cell)
    return ended.need_reports()


def work(rank: int, num_ranks: int, folder: Path, layout: str, cell: Cell) -> None:
    join(rank, num_ranks, folder)
    try:
        result = train(layout, cell, folder)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "one backward per update under DDP" not in str(error):
            raise
        result = {"refused": True}
    report(rank, num_ranks, folder, result)


def train(layout: str, cell: Cell, folder: Path) -> dict[str, Any]:
    """Make updates in bf16; return the losses and a hash of the weights."""
    accelerator = make_accelerator(layout, cell.accumulation, bf16=True)
    network = make_network(cell)
    built = make_optimizer(cell, network, folder)
    model, optimizer = st.prepare(accelerator, network, built)
    if cell.tokentune:
        st.TokenTune(ratio=0.5, seed=5).attach(network)
    rank, num_ranks, losses = accelerator.process_index, accelerator.num_processes, []
    for update in range(UPDATES):
        for micro in range(cell.accumulation):
            batch = random_batch(SIZES, device=CPU, seed=num_ranks * (cell.accumulation * update + micro) + rank)
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and cell.clips:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
    return {"losses": losses, "weights": bytes_digest(accelerator.unwrap_model(model), built)}


def make_network(cell: Cell) -> Any:
    network: Any = build_llama(SIZES, dtype=torch.bfloat16, device=CPU, seed=0)
    if cell.in_4_bits:
        quantize_linears(network)
    if cell.lora:
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        network = get_peft_model(network, config, autocast_adapter_dtype=False)
    return network


def make_optimizer(cell: Cell, network: torch.nn.Module, folder: Path) -> torch.optim.Optimizer:
    settings = dict(cell.settings)
    if cell.method == "hift":
        if settings.get("state") == "disk":
            settings["state_dir"] = folder
        paper = getattr(st.HiFTConfig, "paper", st.HiFTConfig)  # older commits have its settings by default
        return st.HiFT(network, torch.optim.AdamW, config=paper(**settings), lr=1e-2)
    if cell.method == "sft":
        settings = {"density": 0.1, "reselection_interval": 5, "estimation_steps": 2, **settings}
        return st.SFT(network, config=st.SFTConfig(**settings), lr=1e-2, total_steps=UPDATES)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)


if __name__ == "__main__":
    main()
