"""What HiFT needs on a GPU: memory and time of full-parameter fine-tuning of a Llama with random weights, 7B or 8B.

bf16 weights made on the device (no download, no second copy), batch 1 x 512, activation checkpointing (non-reentrant),
HiFT around AdamW with fp32 masters, state in pinned host memory, default pieces. For every group of a cycle:

- `peak_bytes`: `torch.cuda.max_memory_allocated` over forward, backward and step; `left_bytes`: what is allocated
  after the step.
- `forward_backward_ms`, `step_ms`: CUDA events on the computing stream.
- `waits_ms`: within `step_ms`, how long the computing stream stood still for a transfer, by events on both sides of
  every wait. A transfer hidden behind launches that come late is not in it.
- `beyond_resident_ms` (summary): `step_ms` beyond the same step of a model of few blocks whose state never leaves the
  device. It holds everything that streaming costs: exposed transfers, and the launches of many small pieces.

The first cycle allocates and pins each group's host memory, so it is listed, and the second one counts. Nothing waits
for the device within a cycle. Last, the dense forward and backward pass of the same model, without an optimizer.

    python benchmarks/gpu.py                                   # Llama-2-7B: 76 GiB of host memory
    python benchmarks/gpu.py --batch_size 2 --length 2048 --output benchmarks/results/gpu_4096.json
    python benchmarks/gpu.py --shape llama-3-8b --output gpu_8b.json   # 90 GiB
    python benchmarks/gpu.py --blocks 4 --output trial.json
    python benchmarks/gpu.py --device cpu --blocks 2 --hidden 64 --heads 4 --output dry.json   # the same code, dry
    python benchmarks/gpu.py campaign --part 1   # all that a new card is asked: `gpu_campaign.py`

In a dry run on a CPU events are the wall clock, nothing waits and no memory is counted; a dry run says so in its result
and can't be written to `results/` unasked.
"""

import argparse
import dataclasses
import gc
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_campaign
import torch
from environment import record_environment
from llama import LlamaSizes, build_llama, num_parameters, random_batch
from result_files import RESULTS, write_json

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.copy_streams import CopyStreams, streams_made_by
from slivertune.hift.offload_buffer import host_buffer

SHAPES: dict[str, dict[str, int]] = {
    "llama-2-7b": {"hidden": 4096, "intermediate": 11008, "blocks": 32, "heads": 32, "vocabulary": 32_000},
    "llama-3-8b": {
        "hidden": 4096,
        "intermediate": 14_336,
        "blocks": 32,
        "heads": 32,
        "kv_heads": 8,
        "vocabulary": 128_256,
    },
}
HOST_BYTES_PER_PARAMETER = 12
"""An fp32 master and AdamW's two moments."""


class Timeline:
    """Spans of the computing stream by name; nothing waits for the device until they are read.

    Args:
        device: CUDA events there; on a CPU the wall clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what is queued inside."""
        start = self._mark()
        yield
        self._spans.setdefault(name, []).append((start, self._mark()))

    def milliseconds(self, name: str) -> float:
        """Return the sum of the spans of this name; the device must be idle by now."""
        if self._device.type == "cuda":
            return math.fsum(start.elapsed_time(end) for start, end in self._spans.get(name, []))
        return math.fsum(1e3 * (end - start) for start, end in self._spans.get(name, []))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class TimedStreams(CopyStreams):
    """Copy streams that record how long the computing stream waits for them, as `waits` of the current timeline."""

    timeline: Timeline | None = None

    def compute_after(self, event: Any) -> None:
        if event is None or self.timeline is None:
            super().compute_after(event)
            return
        with self.timeline.span("waits"):
            super().compute_after(event)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def make_hift(model: torch.nn.Module, config: st.HiFTConfig) -> st.HiFT:
    return st.HiFT(model, torch.optim.AdamW, config=config, lr=1e-5)


def make_model(sizes: LlamaSizes, device: torch.device) -> Any:
    model = build_llama(sizes, dtype=torch.bfloat16, device=device, seed=0)
    enable_checkpointing(model, {"use_reentrant": False})
    return model


def run_cycle(model: Any, optimizer: st.HiFT, batch: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Train every group once; memory and times by group, in the order of their turns.

    Raises:
        RuntimeError: If a loss is not finite: times of such a run mean nothing.
    """
    device = batch["input_ids"].device
    records, timelines = [], []
    losses = torch.zeros(optimizer.num_groups, device=device)  # one tensor, so that steps leave nothing behind
    for index in range(optimizer.num_groups):
        layer = optimizer.groups[optimizer.active_group].layers[0]
        timeline = TimedStreams.timeline = Timeline(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with streams_made_by(TimedStreams):  # they are made when the first group's state is
            with timeline.span("forward_backward"):
                loss = model(**batch).loss
                loss.backward()
            start = time.perf_counter()
            with timeline.span("step"):
                optimizer.step()
        host_seconds = time.perf_counter() - start
        losses[index] = loss.detach()
        del loss
        records.append(
            {
                "layer": layer.name,
                "kind": layer.kind,
                "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
                "left_bytes": allocated_bytes(device),
                "host_seconds_of_step": host_seconds,
            }
        )
        timelines.append(timeline)
    synchronize(device)
    for record, timeline, loss in zip(records, timelines, losses.tolist(), strict=True):
        record["loss"] = loss
        if not math.isfinite(record["loss"]):
            raise RuntimeError(f"the loss while {record['layer']} trained is {record['loss']}; nothing is written")
        for name in ("forward_backward", "step", "waits"):
            record[f"{name}_ms"] = timeline.milliseconds(name)
    return records


def measure_hift(model: Any, config: st.HiFTConfig, sizes: LlamaSizes, num_cycles: int) -> list[list[dict[str, Any]]]:
    """Train for some cycles, and return the records of each."""
    optimizer = make_hift(model, config)
    batch = random_batch(sizes, device=model.device, seed=1)
    cycles = []
    for cycle in range(num_cycles):
        cycles.append(run_cycle(model, optimizer, batch))
        mean = statistics.fmean(one["forward_backward_ms"] + one["step_ms"] for one in cycles[-1])
        print(f"state={config.state!r}, {sizes.blocks} blocks, cycle {cycle + 1}: {mean:.1f} ms a step", flush=True)
    optimizer.detach()
    return cycles


def measure_dense(model: Any, sizes: LlamaSizes, num_steps: int) -> dict[str, Any]:
    """Time the dense forward and backward pass: gradients of all weights, no optimizer, one pass to warm up."""
    device = model.device
    batch = random_batch(sizes, device=device, seed=1)
    timelines = []
    try:
        for _ in range(num_steps + 1):
            timelines.append(Timeline(device))
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            with timelines[-1].span("dense"):
                model(**batch).loss.backward()
            model.zero_grad()
        synchronize(device)
    except torch.OutOfMemoryError:
        model.zero_grad()
        return {"out_of_memory": True}
    times = [timeline.milliseconds("dense") for timeline in timelines[1:]]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"forward_backward_ms": times, "median_ms": statistics.median(times), "peak_bytes": peak}


def measure_host_memory(device: torch.device, num_bytes: int) -> dict[str, float]:
    """How fast host memory is pinned, and copied to the device and back, over one buffer of so many bytes."""
    start = time.perf_counter()
    buffer = host_buffer(CopyStreams(device))
    buffer.reserve({torch.uint8: num_bytes})
    pinning = time.perf_counter() - start
    on_host = buffer.empty_like(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    seconds: dict[str, list[float]] = {"inbound": [], "outbound": []}
    for _ in range(4):
        timeline = Timeline(device)
        with timeline.span("inbound"):
            on_device.copy_(on_host, non_blocking=True)
        with timeline.span("outbound"):
            on_host.copy_(on_device, non_blocking=True)
        synchronize(device)
        for way, series in seconds.items():
            series.append(timeline.milliseconds(way) / 1e3)
    return {
        "pinning_gb_per_second": num_bytes / 1e9 / pinning,
        "inbound_gb_per_second": num_bytes / 1e9 / min(seconds["inbound"]),
        "outbound_gb_per_second": num_bytes / 1e9 / min(seconds["outbound"]),
    }


def summarize(
    counted: Sequence[dict[str, Any]], resident: Sequence[dict[str, Any]], dense: dict[str, Any]
) -> dict[str, Any]:
    """Means over the groups of the cycle that counts, and what its steps take beyond the resident ones.

    Args:
        counted: Records of the streamed cycle that counts.
        resident: Records of a cycle whose state stays on the device.
        dense: What `measure_dense` returned.
    """
    mean = {
        f"mean_{name}": statistics.fmean(one[name] for one in counted)
        for name in ("forward_backward_ms", "step_ms", "waits_ms")
    }
    mean["mean_ms"] = mean["mean_forward_backward_ms"] + mean["mean_step_ms"]
    kinds = sorted({one["kind"] for one in counted})
    by_kind = {
        kind: {
            "step_ms": _median(counted, kind, "step_ms"),
            "resident_step_ms": _median(resident, kind, "step_ms"),
            "peak_bytes": max(
                (one["peak_bytes"] for one in counted if one["kind"] == kind and one["peak_bytes"]), default=None
            ),
        }
        for kind in kinds
    }
    for values in by_kind.values():
        values["beyond_resident_ms"] = values["step_ms"] - values["resident_step_ms"]
    beyond = statistics.fmean(by_kind[one["kind"]]["beyond_resident_ms"] for one in counted)
    return {
        **mean,
        "peak_bytes": max((one["peak_bytes"] for one in counted if one["peak_bytes"]), default=None),
        "waits_share": mean["mean_waits_ms"] / mean["mean_ms"],
        "mean_beyond_resident_ms": beyond,
        "beyond_resident_share": beyond / mean["mean_ms"],
        "by_kind": by_kind,
        "ratio_to_dense_forward_backward": mean["mean_ms"] / dense["median_ms"] if "median_ms" in dense else None,
    }


def _median(records: Sequence[dict[str, Any]], kind: str, key: str) -> float:
    return statistics.median(one[key] for one in records if one["kind"] == kind)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b", help="sizes of the model, unless given here")
    for name in ("hidden", "intermediate", "blocks", "heads", "kv_heads", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, help="default: the shape's; --intermediate scaled with --hidden")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--cycles", type=int, default=2, help="cycles; the last one counts, the first allocates")
    parser.add_argument("--resident_blocks", type=int, default=2, help="blocks of the model whose state stays")
    parser.add_argument("--dense_steps", type=int, default=5)
    parser.add_argument("--stream_bytes", type=int, default=st.HiFTConfig.paper().stream_bytes)
    parser.add_argument("--probe_bytes", type=int, default=2**30, help="bytes to measure pinning and copying with")
    parser.add_argument("--device", default="cuda", help="`cpu` is a dry run, whose figures mean nothing")
    parser.add_argument("--output", type=Path, help="result file")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and arguments.output is None:
        parser.error("--device cpu is a dry run and needs --output: its figures must not stand among the results")
    refuse_without_cuda(parser, arguments)
    if arguments.cycles < 2:
        parser.error(f"--cycles {arguments.cycles} must be at least 2: the first one allocates")
    shape = SHAPES[arguments.shape]
    hidden = arguments.hidden or shape["hidden"]
    arguments.intermediate = arguments.intermediate or max(1, round(hidden * shape["intermediate"] / shape["hidden"]))
    if arguments.heads is not None and arguments.kv_heads is None:
        arguments.kv_heads = arguments.heads
    for name, value in shape.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def refuse_without_cuda(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Complain where `--device` is a GPU and torch sees none."""
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device, and torch sees none; nothing was measured or written")


def refuse_dry_result(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Complain where a dry run names no file of its own."""
    if (arguments.device == "cpu" or arguments.quick) and arguments.output is None:
        parser.error("a dry run, by --device cpu or --quick, needs --output: it must not stand among the results")


def count_parameters(sizes: LlamaSizes) -> int:
    """Elements of a model's weights, without making them."""
    return num_parameters(build_llama(sizes, dtype=torch.bfloat16, device=torch.device("meta"), seed=0))


def refuse_without_host_memory(num_weights: int) -> None:
    """Stop before the machine swaps or kills: pinned memory can't be taken back.

    Raises:
        SystemExit: If less host memory is available than the masters and the state need.
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return
    fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
    available, needed = 1024 * int(fields["MemAvailable"].split()[0]), HOST_BYTES_PER_PARAMETER * num_weights
    if needed > available:
        raise SystemExit(
            f"masters and state of {num_weights:,} weights need {needed / 1e9:.1f} GB of host memory and "
            f"{available / 1e9:.1f} GB are available; lower --blocks"
        )


def main() -> None:
    """Measure and write the result file."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    fields = {field.name for field in dataclasses.fields(LlamaSizes)}
    sizes = LlamaSizes(**{name: value for name, value in vars(arguments).items() if name in fields})
    small = dataclasses.replace(sizes, blocks=min(arguments.resident_blocks, sizes.blocks))

    refuse_without_host_memory(count_parameters(sizes))
    host_memory = measure_host_memory(device, arguments.probe_bytes)
    model = make_model(small, device)
    resident = measure_hift(model, st.HiFTConfig.paper(state="device"), small, arguments.cycles)[-1]
    del model
    gc.collect()  # the optimizer's cycles of references, or its state would count in the peaks to come
    if device.type == "cuda":
        torch.cuda.empty_cache()
    start = time.perf_counter()
    model = make_model(sizes, device)
    synchronize(device)
    print(f"{num_parameters(model):,} weights made in {time.perf_counter() - start:.1f} s", flush=True)
    before = allocated_bytes(device)
    config = st.HiFTConfig.paper(stream_bytes=arguments.stream_bytes)
    streamed = measure_hift(model, config, sizes, arguments.cycles)
    dense = measure_dense(model, sizes, arguments.dense_steps)
    summary = summarize(streamed[-1], resident, dense)
    write_json(
        arguments.output or RESULTS / "gpu.json",
        {
            "environment": record_environment(),
            "dry_run": device.type != "cuda",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cuda": torch.version.cuda if device.type == "cuda" else None,
            "sizes": dataclasses.asdict(sizes),
            "resident_blocks": small.blocks,
            "stream_bytes": arguments.stream_bytes,
            "num_parameters": num_parameters(model),
            "weights_bytes": sum(parameter.nbytes for parameter in model.parameters()),
            "allocated_before_bytes": before,
            "host_memory": host_memory,
            "summary": summary,
            "dense": dense,
            "cycles": streamed,
            "resident_cycle": resident,
        },
    )
    print(
        f"peak {summary['peak_bytes']} bytes; {summary['mean_ms']:.1f} ms a step, {summary['mean_waits_ms']:.1f} ms of "
        f"it waiting for transfers, {summary['mean_beyond_resident_ms']:.1f} ms beyond a step with resident state"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["campaign"]:
        sys.exit(gpu_campaign.main(sys.argv[2:]))
    main()
