"""What TokenTune saves in time and in memory.

One training step without the optimizer (forward and backward) of a Llama with 8 blocks of width 512 and a vocabulary
of 32,000, on 2 sequences of 1,024 tokens, fp32: dense, dense with gradient checkpointing, TokenTune at 50, 30, 20 and
10 %, and at 30 % with the feed-forward parts, or whole layers, computed again. Targets: at 30 % at most 0.55 of the
dense step, and bytes saved for the backward within 5 % of r x dense + (1 - r) x (keys and values of all tokens).

    OMP_NUM_THREADS=1 python benchmarks/tokentune.py                   # 10 minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/tokentune.py --quick --output trial.json
    python benchmarks/tokentune.py --device cuda                       # bf16, 4 sequences of 2,048 tokens, width 2,048

All variants alternate in one process on one thread, on the same batches and an equal model; the ratios that count are
those of CPU time within a round (on a GPU, of the clock between two moments at which the device is idle; target there:
0.60). Bytes are counted in a round of their own, which is not timed. Never run so far: `--device cuda`.
"""

import argparse
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import method_tables
import torch
from environment import record_environment
from llama import LlamaSizes, build_llama, num_parameters, random_batch
from result_files import RESULTS, write_json

import slivertune as st
from slivertune.core.checkpointing import disable_checkpointing, enable_checkpointing

FULL = LlamaSizes(hidden=512, intermediate=1376, blocks=8, heads=8, vocabulary=32_000, batch_size=2, length=1024)
QUICK = LlamaSizes(hidden=32, intermediate=48, blocks=2, heads=4, vocabulary=97, batch_size=2, length=64)
ON_GPU = LlamaSizes(hidden=2048, intermediate=5504, blocks=8, heads=16, vocabulary=32_000, batch_size=4, length=2048)
TIME_LIMITS = {"cpu": 0.55, "cuda": 0.60}
"""Of the dense step, at 30 %, by the type of the device."""
SAVED_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A way to train."""

    ratio: float | None = None
    """TokenTune's; None is dense."""
    checkpointing: bool = False
    """Transformers' gradient checkpointing of whole layers."""
    checkpoint_mlp: bool = False
    """TokenTune's own, of the feed-forward parts."""


VARIANTS = {
    "dense": Variant(),
    "dense_checkpointing": Variant(checkpointing=True),
    "50%": Variant(ratio=0.5),
    "30%": Variant(ratio=0.3),
    "20%": Variant(ratio=0.2),
    "10%": Variant(ratio=0.1),
    "30%_checkpoint_mlp": Variant(ratio=0.3, checkpoint_mlp=True),
    "30%_checkpointing": Variant(ratio=0.3, checkpointing=True),
}


@contextlib.contextmanager
def applied(variant: Variant, model: Any) -> Iterator[None]:
    """Have the model train the variant's way."""
    with contextlib.ExitStack() as stack:
        if variant.checkpointing:
            enable_checkpointing(model, {"use_reentrant": False})
            stack.callback(disable_checkpointing, model)
        if variant.ratio is not None:
            tune = st.TokenTune(ratio=variant.ratio, checkpoint_mlp=variant.checkpoint_mlp)
            stack.enter_context(tune.attach(model))
        yield


def step_seconds(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """CPU and wall seconds of a forward and a backward; the gradients are dropped after."""
    synchronize(batch["input_ids"].device)
    start, cpu_start = time.perf_counter(), time.process_time()
    model(**batch).loss.backward()
    synchronize(batch["input_ids"].device)
    seconds = {"cpu": time.process_time() - cpu_start, "wall": time.perf_counter() - start}
    model.zero_grad()
    return seconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_bytes(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that a forward saves for the backward, each storage once and weights not at all, and bytes at the peaks."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad()
    del loss
    with st.Ledger(model) as ledger:
        model(**batch).loss.backward()
        peak = ledger.peak
    model.zero_grad()
    return {
        "saved_bytes": sum(saved.values()),
        "peak_activation_bytes": count_peak_activations(model, batch),
        "peak_bytes": peak.device,
    }


def count_peak_activations(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Return the peak bytes beside weights, if each gradient is dropped as soon as it is there."""
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
        for parameter in model.parameters()
    ]
    with st.Ledger(model) as ledger:
        model(**batch).loss.backward()
        peak = ledger.peak
    for hook in hooks:
        hook.remove()
    return peak.device - peak.parameters


def floor_bytes(dense_saved: int, ratio: float, sizes: LlamaSizes, itemsize: int) -> float:
    """Return the least bytes that can be kept: r x dense, and keys and values of the other tokens."""
    keys_and_values = 2 * sizes.blocks * sizes.batch_size * sizes.length * sizes.hidden * itemsize
    return ratio * dense_saved + (1 - ratio) * keys_and_values


def measure(sizes: LlamaSizes, num_rounds: int, device: torch.device) -> dict[str, Any]:
    """Measure all variants.

    Args:
        sizes: The model and its batch.
        device: Where; fp32 on a CPU, bf16 on a GPU.
        num_rounds: Timed rounds; one more before them is not.

    Returns:
        Times, bytes, the medians over rounds of the ratio to the dense step of the same round, and the targets.
    """
    dtype, clock = (torch.bfloat16, "wall") if device.type == "cuda" else (torch.float32, "cpu")
    model = build_llama(sizes, dtype=dtype, device=device, seed=0)
    counted: dict[str, dict[str, int]] = {}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for index in range(num_rounds + 1):
        batch = random_batch(sizes, device=device, seed=index)
        for name in list(VARIANTS) if index % 2 else list(reversed(VARIANTS)):
            with applied(VARIANTS[name], model):
                if not index:
                    counted[name] = count_bytes(model, batch)
                seconds[name].append(step_seconds(model, batch))
        ratios = (f"{name} {each[-1][clock] / seconds['dense'][-1][clock]:.3f}" for name, each in seconds.items())
        print(f"round {index} of {num_rounds}:", ", ".join(ratios), flush=True)
    variants = {}
    for name, variant in VARIANTS.items():
        pairs = list(zip(seconds[name][1:], seconds["dense"][1:], strict=True))
        variants[name] = {
            **dataclasses.asdict(variant),
            **counted[name],
            "median_ratio": {kind: statistics.median(a[kind] / b[kind] for a, b in pairs) for kind in ("cpu", "wall")},
            "seconds": seconds[name][1:],
        }
        if variant.ratio is not None and not (variant.checkpointing or variant.checkpoint_mlp):
            floor = floor_bytes(counted["dense"]["saved_bytes"], variant.ratio, sizes, dtype.itemsize)
            variants[name]["saved_bytes_to_floor"] = counted[name]["saved_bytes"] / floor
    return {
        "sizes": dataclasses.asdict(sizes),
        "num_parameters": num_parameters(model),
        "variants": variants,
        "dtype": str(dtype),
        "clock": clock,
        "time_limit_at_30%": TIME_LIMITS[device.type],
        "saved_tolerance": SAVED_TOLERANCE,
        "within_limits": variants["30%"]["median_ratio"][clock] <= TIME_LIMITS[device.type]
        and all(each.get("saved_bytes_to_floor", 1.0) <= 1 + SAVED_TOLERANCE for each in variants.values()),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that it runs, measures nothing")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--output", type=Path, help="where to write; results/tokentune.json, on a GPU tokentune_gpu.json"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} must be at least 1")
    if arguments.quick and arguments.output is None:
        parser.error("--quick measures nothing and needs --output, so that it replaces no result")
    if arguments.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and torch sees none")
    on_gpu = arguments.device.type == "cuda"
    torch.set_num_threads(1)
    sizes = QUICK if arguments.quick else ON_GPU if on_gpu else FULL
    environment = record_environment()
    result = measure(sizes, arguments.rounds, arguments.device)
    print(method_tables.tokentune(result))
    output = arguments.output or RESULTS / ("tokentune_gpu.json" if on_gpu else "tokentune.json")
    write_json(output, {"environment": environment, **result})
    print(f"written to {output}")


if __name__ == "__main__":
    main()
