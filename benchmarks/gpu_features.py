"""Each memory feature once, on a GPU: time of an update, peak, waits of the host, and whether the bits are the same.

A Llama with the widths of Llama-3.1-8B, fewer blocks and random weights, in bf16 with activation checkpointing and the
loss in chunks. Each way makes the model anew and trains it for three rounds of all groups. The first round runs under
torch's deterministic algorithms, and its weights are compared to the bit with those of the first way, HiFT with all
state on the device, where the feature promises that. The second warms up, and the third is timed between two waits for
the device. One update more counts where the host waited for the device (torch's sync debug mode). For each way in
`--trace`, one more update is recorded as a trace for https://ui.perfetto.dev, in a file beside the result.

    python benchmarks/gpu_features.py
    python benchmarks/gpu_features.py --ways host disk --output trial.json
    python benchmarks/gpu_features.py --device cpu --quick --output dry.json     # a tiny model, dry

A way that fails has the error in its row. Rows are written one by one. In `results/gpu_features.json`, rows whose
`warm_up_rounds` is 1 were timed in the second round.
"""

import argparse
import gc
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

# cuBLAS reads it at the first product; without it, equal runs may differ.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from curve_ways import RATE, add_lora, rank_of
from environment import record_environment
from gpu import SHAPES, refuse_dry_result, refuse_without_cuda, synchronize
from llama import LlamaSizes, build_llama, quantize_linears, random_batch
from markdown_table import markdown_table
from result_files import RESULTS, write_json
from torch import nn
from transformers.optimization import Adafactor

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing

TINY = {"hidden": 32, "intermediate": 64, "heads": 4, "vocabulary": 97, "kv_heads": None}
_OTHER_UPDATES = 6
"""Updates per round of a way without groups of layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """A way of training."""

    make: Callable[[nn.Module], Any]
    """Makes the optimizer of a model."""
    keeps_bits: bool = False
    """Whether it trains the bits of state on the device."""
    starts_on_host: bool = False


def _hift(
    before: Callable[[nn.Module], Any] | None = None, optimizer: Any = torch.optim.AdamW, **settings: Any
) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        if before is not None:
            before(model)
        if settings.get("state") == "disk":
            settings["state_dir"] = tempfile.mkdtemp(prefix="state-")
        optimizer_class, options = optimizer if isinstance(optimizer, tuple) else (optimizer, {})
        return st.HiFT(model, optimizer_class, config=st.HiFTConfig.paper(**settings), lr=RATE, **options)

    return make


def _from(module: str, name: str) -> Callable[[nn.Module], Any]:
    """Return HiFT around an optimizer of a package that may be missing."""

    def make(model: nn.Module) -> Any:
        return _hift(optimizer=getattr(import_module(module), name))(model)

    return make


def _full(**settings: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        config = st.HiFTConfig.all_layers(**settings)
        return st.HiFT(model, Adafactor, config=config, lr=RATE, scale_parameter=False, relative_step=False)

    return make


def _sft(**settings: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        config = st.SFTConfig(
            equivalent_lora_rank=rank_of(model), reselection_interval=4, estimation_steps=2, **settings
        )
        return st.SFT(model, config=config, lr=RATE, total_steps=1000)

    return make


def _quantized(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def quantize_first(model: nn.Module) -> Any:
        quantize_linears(model)
        return make(model)

    return quantize_first


def _token_tune(model: nn.Module) -> Any:
    return st.TokenTune(ratio=0.25).attach(model)


FEATURES: dict[str, Feature] = {
    "device": Feature(make=_hift(state="device"), keeps_bits=True),
    "host": Feature(make=_hift(), keeps_bits=True),
    "prefetch off": Feature(make=_hift(prefetch_bytes=0), keeps_bits=True),
    "disk": Feature(make=_hift(state="disk"), keeps_bits=True),
    "discard": Feature(make=_hift(state="discard"), keeps_bits=True),
    "gradients host": Feature(make=_hift(gradients="host"), keeps_bits=True),
    "gradients stepped": Feature(make=_hift(gradients="stepped"), keeps_bits=True),
    "weights host": Feature(make=_hift(weights="host"), keeps_bits=True, starts_on_host=True),
    "weights host, none resident": Feature(
        make=_hift(weights="host", resident_bytes=0), keeps_bits=True, starts_on_host=True
    ),
    "weights host, int8": Feature(make=_hift(weights="host", waiting="int8"), starts_on_host=True),
    "weights host, nf4": Feature(make=_hift(weights="host", waiting="nf4"), starts_on_host=True),
    "waiting int8": Feature(make=_hift(waiting="int8")),
    "waiting nf4": Feature(make=_hift(waiting="nf4")),
    "activations offloaded": Feature(make=_hift(st.offload_activations), keeps_bits=True),
    "activations kept": Feature(make=_hift(partial(st.keep_activations, num_blocks="auto")), keeps_bits=True),
    "tiles of 1,024 tokens": Feature(make=_hift(partial(st.tile_tokens, tile_size=1024))),
    "compiled blocks": Feature(make=_hift(st.compile_blocks)),
    "fused AdamW": Feature(make=_hift(optimizer=(torch.optim.AdamW, {"fused": True}))),
    "bitsandbytes' AdamW8bit": Feature(make=_from("bitsandbytes.optim", "AdamW8bit")),
    "torchao's AdamW8bit": Feature(make=_from("torchao.optim", "AdamW8bit")),
    "torchao's AdamW4bit": Feature(make=_from("torchao.optim", "AdamW4bit")),
    "torchao's AdamWFp8": Feature(make=_from("torchao.optim", "AdamWFp8")),
    "Adafactor": Feature(make=_hift(optimizer=torch.optim.Adafactor)),
    "SGD": Feature(make=_hift(optimizer=torch.optim.SGD)),
    "full": Feature(make=_full()),
    "full, not compiled": Feature(make=_full(compile_step="never")),
    "TokenTune": Feature(make=_hift(_token_tune)),
    "SFT (AG)": Feature(make=_sft()),
    "SFT (AG), packed": Feature(make=_sft(packed=True)),
    "SFT (MA)": Feature(make=_sft(selection="momentum")),
    "SFT (AG) over nf4": Feature(make=_quantized(_sft())),
    "LoRA": Feature(make=add_lora),
    "QLoRA": Feature(make=_quantized(add_lora)),
}


def measure(
    feature: Feature,
    sizes: LlamaSizes,
    device: torch.device,
    expected: list[torch.Tensor] | None,
    trace: Path | None = None,
) -> tuple[dict[str, Any], list[torch.Tensor] | None]:
    """Train three rounds.

    Args:
        feature: Way of training.
        sizes: Sizes of the model.
        device: Device of the computation.
        expected: Weights after the first round of the way that others are compared with, or None.
        trace: File to which the trace of one more update is written, or None.

    Returns:
        The row, and the weights after the first round in host memory, or None if the way keeps no bits.
    """
    place = torch.device("cpu") if feature.starts_on_host else device
    model = build_llama(sizes, dtype=torch.bfloat16, device=device, seed=0).to(place)
    enable_checkpointing(model, {"use_reentrant": False})
    st.attach_chunked_cross_entropy(model)
    optimizer = feature.make(model)
    num_groups = getattr(optimizer, "num_groups", 1)
    round_length = num_groups if num_groups > 1 else _OTHER_UPDATES
    batches = [random_batch(sizes, device=device, seed=seed) for seed in range(round_length)]

    torch.use_deterministic_algorithms(True, warn_only=not feature.keeps_bits)
    try:
        _train(model, optimizer, batches)
    finally:
        torch.use_deterministic_algorithms(False)
    row: dict[str, Any] = {}
    weights = _weights(model) if feature.keeps_bits else None
    if weights is not None and expected is not None:
        row["same_bits"] = all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))

    is_cuda = device.type == "cuda"
    _train(model, optimizer, batches)
    synchronize(device)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    loss = _train(model, optimizer, batches)
    synchronize(device)
    row |= {
        "warm_up_rounds": 2,
        "milliseconds": 1e3 * (time.perf_counter() - start) / round_length,
        "updates": round_length,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "loss": float(loss),
    }
    if is_cuda:
        row["host_waits"] = _host_waits(model, optimizer, batches[:1])
    if trace is not None:
        try:
            with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
                _train(model, optimizer, batches[:1])
                synchronize(device)
            profiler.export_chrome_trace(str(trace))
        except Exception as error:  # the figures were measured before
            row["trace_failure"] = f"{type(error).__name__}: {error}"[:600]
    return row, weights


def _train(model: nn.Module, optimizer: Any, batches: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    for batch in batches:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def _weights(model: nn.Module) -> list[torch.Tensor]:
    """Copy the exact weights to the host: on the device they would count among the peak."""
    state = model.state_dict()
    return [state[name].detach().to("cpu", copy=True) for name in sorted(state)]


def _host_waits(model: nn.Module, optimizer: Any, batches: Sequence[dict[str, torch.Tensor]]) -> dict[str, int]:
    """Count the lines that waited for the device in an update."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _train(model, optimizer, batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = (
        f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}"
        for each in caught
        if "synchroniz" in str(each.message)
    )
    return dict(Counter(lines).most_common(8))


def parse_arguments() -> argparse.Namespace:
    """Read the command line; all features by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(FEATURES), default=list(FEATURES))
    parser.add_argument("--trace", nargs="+", choices=list(FEATURES), default=[], help="ways to write a trace of")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096, help="tokens of the one sequence of an update")
    parser.add_argument("--seconds", type=float, help="begin no way after so many seconds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="`cpu` is a dry run")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see whether it runs; needs --output")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if others := set(arguments.trace) - set(arguments.ways):
        parser.error(f"--trace names {', '.join(sorted(others))}, which --ways leaves out")
    refuse_dry_result(parser, arguments)
    refuse_without_cuda(parser, arguments)
    arguments.output = arguments.output or RESULTS / "gpu_features.json"
    return arguments


def main() -> None:
    """Measure the ways one by one, write after each, and print the table."""
    arguments = parse_arguments()
    began = time.perf_counter()
    device = torch.device(arguments.device)
    shape = {**SHAPES["llama-3-8b"], **(TINY if arguments.quick else {}), "blocks": arguments.blocks}
    sizes = LlamaSizes(**shape, batch_size=1, length=64 if arguments.quick else arguments.length)
    rows: dict[str, Any] = {}
    expected: list[torch.Tensor] | None = None
    for name in arguments.ways:
        if arguments.seconds and time.perf_counter() - began > arguments.seconds:
            break
        file = f"{arguments.output.stem}-{name.replace(' ', '_')}.trace.json.gz"
        trace = arguments.output.with_name(file) if name in arguments.trace else None
        try:
            rows[name], weights = measure(FEATURES[name], sizes, device, expected, trace)
            expected = expected or weights
        except Exception as error:  # a row of its own: the others are still worth having
            rows[name] = {"failure": f"{type(error).__name__}: {error}"[:600]}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        write_json(
            arguments.output,
            {
                "environment": record_environment(),
                "blocks": sizes.blocks,
                "length": sizes.length,
                "dry_run": arguments.device == "cpu" or arguments.quick,
                "rows": rows,
            },
        )
        print(name, rows[name], flush=True)
    print(table(rows))


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Write all ways in Markdown."""
    return markdown_table(
        ["Way", "milliseconds per update", "GiB at the peak", "bits as on the device", "waits of the host"],
        [
            [name, row["failure"], "", "", ""]
            if "failure" in row
            else [
                name,
                f"{row['milliseconds']:.0f}",
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}",
                {True: "yes", False: "no", None: ""}[row.get("same_bits")],
                str(sum(row.get("host_waits", {}).values())),
            ]
            for name, row in rows.items()
        ],
    )


if __name__ == "__main__":
    main()
