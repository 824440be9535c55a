"""A long run with evaluation, saving and generation in between: what it holds must not grow.

A tiny Llama on a CPU is trained by HiFT, SFT and TokenTune x HiFT, each for thousands of updates in one process, as a
user's loop does it: every 50 updates an evaluation, every 100 a generation, every 200 a checkpoint
(`accelerator.save_state`, the newest kept). At every 10th of the run everything that could pile up is counted: resident
memory, tensors' storages that are alive and their bytes, open files, threads, hooks of modules, tensors and optimizers.

    OMP_NUM_THREADS=1 python benchmarks/soak.py                         # 2,000 updates each, minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/soak.py --updates 300 --output trial.json

After a warm-up of two tenths, in which caches fill and every group and state is made, counts of storages, their bytes,
files, threads and hooks may not grow at all, and resident memory by no more than `GROWTH_BYTES`. The exit status is 1
if anything did.
"""

import argparse
import gc
import shutil
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerators import make_accelerator
from environment import record_environment
from llama import LlamaSizes, build_llama, random_batch
from result_files import RESULTS, read_json, write_json
from torch.optim.lr_scheduler import LambdaLR

import slivertune as st

METHODS = ("hift", "sft", "tokentune_hift")
SIZES = LlamaSizes(hidden=32, intermediate=64, blocks=2, heads=2, vocabulary=97, batch_size=2, length=32)
CPU = torch.device("cpu")
EVALUATE, GENERATE, SAVE = 50, 100, 200
NUM_COUNTS = 10
WARM_UP = 2
"""Of the counts."""
GROWTH_BYTES = 16 * 2**20
"""Resident memory that allocators may come to hold without anything growing: one leaked gradient a step is 100 MB."""
STEADY = ("storages", "storage_bytes", "files", "threads", "hooks")


def num_hooks(model: torch.nn.Module, optimizer: Any) -> int:
    """Hooks of all modules, of their parameters, and of the optimizer."""
    found = 0
    for module in model.modules():
        found += sum(len(value) for name, value in vars(module).items() if name.endswith("_hooks"))
    for parameter in model.parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found += len(getattr(parameter, kind, None) or ())
    inner = getattr(optimizer, "optimizer", optimizer)
    return found + sum(len(value) for name, value in vars(inner).items() if "hooks" in name and isinstance(value, dict))


def count(model: torch.nn.Module, optimizer: Any) -> dict[str, int]:
    """Everything that could pile up, after what is garbage has gone."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "resident_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "storages": len(storages),
        "storage_bytes": sum(storages.values()),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "system_threads": int(status["Threads"]),
        "hooks": num_hooks(model, optimizer),
    }


def plant(leak: str, model: torch.nn.Module, kept: list[Any]) -> None:
    """Leak one thing, as an update that forgets it would."""
    if leak == "hook":
        model.register_forward_hook(lambda *_: None)
    elif leak == "tensor":
        kept.append(torch.zeros(1))
    else:
        kept.append(Path("/dev/null").open())  # noqa: SIM115 (it is to stay open)


def soak(method: str, updates: int, folder: Path, leak: str | None = None) -> list[dict[str, int]]:
    """Train, and count at every tenth of the run."""
    accelerator = make_accelerator("single")
    model: Any = build_llama(SIZES, dtype=torch.bfloat16, device=CPU, seed=0)
    handle = st.TokenTune(ratio=0.5, seed=5).attach(model) if method == "tokentune_hift" else None
    optimizer: Any
    if method == "sft":
        config = st.SFTConfig(density=0.1, reselection_interval=25, estimation_steps=5)
        optimizer = st.SFT(model, config=config, lr=1e-3, total_steps=updates)
    else:
        optimizer = st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=1e-3)
    built = optimizer
    schedule: Any = LambdaLR(optimizer, lambda ticks: 1 / (1 + 0.01 * ticks))
    model, optimizer, schedule = st.prepare(accelerator, model, optimizer, schedule)
    if handle is not None:
        accelerator.register_for_checkpointing(handle)
    counts, kept = [], list[Any]()
    for update in range(1, updates + 1):
        loss = model(**random_batch(SIZES, device=CPU, seed=update)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        between_updates(model, accelerator, update, folder)
        if leak is not None:
            plant(leak, model, kept)
        if update % (updates // NUM_COUNTS) == 0:
            del loss
            counts.append({"update": update, **count(model, built)})
    return counts


def between_updates(model: Any, accelerator: Any, update: int, folder: Path) -> None:
    """Do between two updates what a user's script does."""
    batch = random_batch(SIZES, device=CPU, seed=-update)
    if update % EVALUATE == 0 or update % GENERATE == 0:
        model.eval()
        with torch.no_grad():
            model(**batch)
        if update % GENERATE == 0:
            prompt = batch["input_ids"][:1, :8]
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, pad_token_id=0)
        model.train()
    if update % SAVE == 0:
        accelerator.save_state(str(folder / f"checkpoint-{update}"))
        shutil.rmtree(folder / f"checkpoint-{update - SAVE}", ignore_errors=True)


def growth(counts: list[dict[str, int]]) -> dict[str, int]:
    """Return each count that grew from the warm-up to its highest value after it, by name."""
    first, rest = counts[WARM_UP], counts[WARM_UP + 1 :]
    grown = {name: max(each[name] for each in rest) - first[name] for name in (*STEADY, "resident_bytes")}
    allowed = {"resident_bytes": GROWTH_BYTES}
    return {name: value for name, value in grown.items() if value > allowed.get(name, 0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods to run")
    parser.add_argument("--updates", type=int, default=2000, help="of each method, a multiple of 100")
    parser.add_argument("--leak", choices=("hook", "tensor", "file"), help="leak one at every update, as a check")
    parser.add_argument("--output", type=Path, default=RESULTS / "soak.json", help="where to write")
    options = parser.parse_args()
    if options.updates < NUM_COUNTS * NUM_COUNTS or options.updates % NUM_COUNTS:
        parser.error(f"--updates {options.updates} must be a multiple of {NUM_COUNTS}, and 100 at least")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    content = read_json(options.output)
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            counts = soak(method, options.updates, Path(folder), options.leak)
        grown = growth(counts)
        content[method] = {
            "environment": record_environment(),
            "updates": options.updates,
            "leak": options.leak,
            "counts": counts,
            "grown": grown,
        }
        write_json(options.output, content)
        print(f"{method:15}{options.updates} updates; grown: {grown or 'nothing'}; {counts[-1]}")
    return 1 if any(content[method]["grown"] for method in options.methods) else 0


if __name__ == "__main__":
    sys.exit(main())
