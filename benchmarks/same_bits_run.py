"""What one commit of slivertune computes, for `same_bits.py`: the losses and final weights of every cell, to the bit.

Imports whatever slivertune the path has, and uses public names alone, so that it runs on older and newer commits alike.
"""

import argparse
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

import faults  # imports what the runs need; they are forks of this process
import torch
from accelerators import make_accelerator
from faults_run import CPU, SIZES, bytes_digest, join, report
from llama import build_llama, random_batch

import slivertune as st

LAYOUTS = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
UPDATES = 10
"""Two cycles of HiFT's four groups and more; reselections of SFT after 2 and 5 updates."""
HIFT_SETTINGS = {field.name for field in fields(st.HiFTConfig)}
HIFT: dict[str, dict[str, Any]] = {
    "hift": {},
    "hift_random": {"order": "random", "layers_per_group": 2, "steps_per_group": 2},
    "hift_split": {"master": "split", "stream_bytes": 4096},
    # The older of two commits may have the name that this setting had before.
    "hift_backward": {"gradients": "stepped"} if "gradients" in HIFT_SETTINGS else {"step_in_backward": True},
    "hift_device": {"state": "device"},
}
SFT: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft_ma": {"selection": "momentum"},
    "sft_packed": {"packed": True},
    "sft_layer": {"form": "layer"},
}
METHODS = (*HIFT, *SFT, "tokentune_dense", "tokentune_hift", "tokentune_sft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="JSON file of the results")
    parser.add_argument("--source", type=Path, required=True, help="folder that slivertune must come from")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options = parser.parse_args()
    if not Path(st.__file__).resolve().is_relative_to(options.source.resolve()):
        raise SystemExit(f"slivertune was imported from {Path(st.__file__).parent}, not from {options.source}")
    found = {}
    for layout in options.layouts:
        for method in options.methods:
            found[f"{layout} {method}"] = run_cell(layout, method)
    options.output.write_text(json.dumps(found), encoding="utf-8")


def run_cell(layout: str, method: str) -> list[dict[str, Any]]:
    """What each rank came to; "refused" is the class of the error of a method that does not go with the layout."""
    ended = faults.fork(1 if layout == "single" else 2, work, layout, method)
    return ended.need_reports()


def work(rank: int, num_ranks: int, folder: Path, layout: str, method: str) -> None:
    join(rank, num_ranks, folder)
    try:
        result = train(layout, method)
    except ValueError as error:
        result = {"refused": type(error).__name__}
    report(rank, num_ranks, folder, result)


def train(layout: str, method: str) -> dict[str, Any]:
    """Clipped updates of two micro-batches each, in bf16."""
    accumulation = 1 if method == "hift_backward" else 2
    accelerator = make_accelerator(layout, accumulation)
    if layout.startswith("zero"):
        accelerator.state.deepspeed_plugin.hf_ds_config.config["bf16"] = {"enabled": True}
    network: Any = build_llama(SIZES, dtype=torch.bfloat16, device=CPU, seed=0)
    built = make_optimizer(method.removeprefix("tokentune_"), network)
    model, optimizer = st.prepare(accelerator, network, built)
    if method.startswith("tokentune"):
        st.TokenTune(ratio=0.5, seed=5).attach(network)
    rank, num_ranks, losses = accelerator.process_index, accelerator.num_processes, []
    for update in range(UPDATES):
        for micro in range(accumulation):
            batch = random_batch(SIZES, device=CPU, seed=num_ranks * (accumulation * update + micro) + rank)
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and method != "hift_backward":
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
    return {"losses": losses, "weights": bytes_digest(accelerator.unwrap_model(model), built)}


def make_optimizer(method: str, network: torch.nn.Module) -> torch.optim.Optimizer:
    if method in HIFT:
        return st.HiFT(network, torch.optim.AdamW, config=st.HiFTConfig(**HIFT[method]), lr=1e-2)
    if method in SFT:
        settings = {"density": 0.1, "reselection_interval": 5, "estimation_steps": 2, **SFT[method]}
        return st.SFT(network, config=st.SFTConfig(**settings), lr=1e-2, total_steps=UPDATES)
    return torch.optim.AdamW(network.parameters(), lr=1e-2)


if __name__ == "__main__":
    main()
