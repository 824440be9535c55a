"""What SFT's training step costs beside LoRA's and the dense one, measured on a CPU.

Whole training steps (forward, backward, optimizer) of a Llama with 8 blocks of width 768 and a vocabulary of 32,000 in
bf16, on 4 sequences of 256 tokens: dense AdamW, LoRA of rank 64 on all linear layers of the blocks (PEFT, adapters in
fp32 as it makes them, AdamW), SFT-AG and SFT-MA with as many trained weights; each with and without gradient
checkpointing. Targets: SFT at most 1.15 of LoRA's step and no more than LoRA's bytes at the peak; estimation phases and
reselections at most 5 % of the time over an interval of S updates.

Bytes are counted twice: in the timed steps, whose peak is the logits of the loss; and in steps on 32 sequences with
the loss in chunks (`slivertune.attach_chunked_cross_entropy`, for LoRA and SFT alike), as `slivertune train` has it.

    OMP_NUM_THREADS=1 python benchmarks/sft.py                        # 25 minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/sft.py --quick --output trial.json

All variants alternate step by step in one process on one thread, on the same batches and equal models. Ratios are of
CPU time to LoRA's step of the same round. `plain` steps are those without estimation and reselection; an interval is
the S updates that end with a reselection, and what its other steps take beyond the median plain one is reselection's
share. Bytes are counted in steps of their own, which are not timed.
"""

import argparse
import dataclasses
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import method_tables
import torch
from environment import record_environment
from llama import LlamaSizes, build_llama, num_parameters, random_batch
from peft import LoraConfig, get_peft_model
from result_files import RESULTS, read_json, write_json

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.ledger import claim

FULL = LlamaSizes(hidden=768, intermediate=2048, blocks=8, heads=12, vocabulary=32_000, batch_size=4, length=256)
QUICK = LlamaSizes(hidden=128, intermediate=192, blocks=2, heads=4, vocabulary=97, batch_size=2, length=16)
RANK = 64
INTERVAL = 20
ESTIMATION = 5
TIME_LIMIT = 1.15
"""Of LoRA's step."""
RESELECTION_LIMIT = 0.05
CPU = torch.device("cpu")
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NAMES = ("dense", "lora", "sft_ag", "sft_ma")
COUNTED = (*NAMES, "sft_ag_packed")
"""What bytes are counted of; `packed=True` is not timed."""
COUNTED_CHUNKED = ("lora", "sft_ag", "sft_ma")
PARTS = ("times", "peaks", "chunked_peaks")
CHUNKED_FACTOR = 8
"""Sequences of `chunked_peaks` to one of the timed batch."""


class Trainee:
    """A model with its optimizer.

    Args:
        name: Which of `COUNTED`.
        sizes: Sizes of the model.
        rank: LoRA's, and what decides how many weights SFT trains.
        num_steps: Updates of the whole run.
        checkpointing: Whether layers are computed again in the backward.
        chunked: Whether the loss is computed in chunks.
    """

    def __init__(
        self, name: str, sizes: LlamaSizes, rank: int, num_steps: int, *, checkpointing: bool, chunked: bool = False
    ) -> None:
        self.model: Any = build_llama(sizes, dtype=torch.bfloat16, device=CPU, seed=0)
        if checkpointing:
            enable_checkpointing(self.model, {"use_reentrant": False})
        self.optimizer = self._make_optimizer(name, rank, num_steps)
        if chunked:
            st.attach_chunked_cross_entropy(self.model)

    def _make_optimizer(self, name: str, rank: int, num_steps: int) -> torch.optim.Optimizer:
        if name == "lora":
            with warnings.catch_warnings():
                # PEFT 0.21 asks by the name that transformers 5.23 retires.
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LAYERS, task_type="CAUSAL_LM")
                self.model = get_peft_model(self.model, config)
        if name in ("dense", "lora"):
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            return torch.optim.AdamW(trained, lr=1e-4)
        config = st.SFTConfig(
            equivalent_lora_rank=rank,
            selection="momentum" if name == "sft_ma" else "accumulated_gradient",
            packed=name == "sft_ag_packed",
            reselection_interval=INTERVAL,
            estimation_steps=ESTIMATION,
        )
        return st.SFT(self.model, config=config, lr=1e-4, total_steps=num_steps)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """CPU seconds of a step on a batch."""
        start = time.process_time()
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - start

    def count(self, batch: dict[str, torch.Tensor]) -> dict[str, int]:
        """Bytes at the peak of a step, by kind; what the optimizer keeps is told to the ledger before it begins."""
        with st.Ledger(self.model) as ledger:
            if isinstance(self.optimizer, st.SFT):
                self.optimizer.claim_state()
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        claim(value, "state")
            self.step(batch)
            peak = ledger.peak
        kinds = {name: getattr(peak, name) for name in ("parameters", "gradients", "state", "residual")}
        return {"peak_bytes": peak.device, **kinds}


def count_peaks(sizes: LlamaSizes, rank: int, *, checkpointing: bool, chunked: bool) -> dict[str, Any]:
    """Count bytes at the peak of two steps of each variant, one in the first estimation phase and one after it.

    Args:
        sizes: The model and its batch.
        rank: LoRA's.
        checkpointing: Whether layers are computed again in the backward.
        chunked: Whether the loss is computed in chunks, and the steps that are counted are on more sequences.

    Returns:
        Bytes by kind, for each variant and each of the two steps.
    """
    large = dataclasses.replace(sizes, batch_size=CHUNKED_FACTOR * sizes.batch_size) if chunked else sizes
    moments = {ESTIMATION - 2: "estimating", ESTIMATION + 1: "plain"}
    peaks: dict[str, Any] = {}
    for name in COUNTED_CHUNKED if chunked else COUNTED:
        trainee = Trainee(name, sizes, rank, 10 * INTERVAL, checkpointing=checkpointing, chunked=chunked)
        peaks[name] = {}
        for index in range(ESTIMATION + 2):
            batch = random_batch(large if index in moments else sizes, device=CPU, seed=index)
            if index in moments:
                peaks[name][moments[index]] = trainee.count(batch)
            else:
                trainee.step(batch)
    return peaks


def measure_times(sizes: LlamaSizes, rank: int, num_intervals: int, *, checkpointing: bool) -> dict[str, Any]:
    """Time all variants.

    Args:
        sizes: The model and its batch.
        rank: LoRA's.
        num_intervals: Intervals that count; one more before them, which begins with the first reselection, does not.
        checkpointing: Whether layers are computed again in the backward.

    Returns:
        Times and their ratios to LoRA's step.
    """
    num_steps = 10 * INTERVAL * (num_intervals + 1)
    trainees = {name: Trainee(name, sizes, rank, num_steps, checkpointing=checkpointing) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    num_rounds = INTERVAL * (num_intervals + 1)
    estimates: list[bool] = []
    for index in range(num_rounds):
        batch = random_batch(sizes, device=CPU, seed=index)
        ag = trainees["sft_ag"].optimizer
        estimates.append(ag.is_estimating)  # type: ignore[attr-defined]
        for name in NAMES if index % 2 else reversed(NAMES):
            seconds[name].append(trainees[name].step(batch))
        if index % 10 == 9:
            last = (f"{name} {seconds[name][index] / seconds['lora'][index]:.3f}" for name in NAMES)
            print(f"{index + 1} of {num_rounds} steps; of LoRA's:", ", ".join(last), flush=True)
    return {
        "num_parameters": num_parameters(trainees["dense"].model),
        "num_trained": {
            "lora": sum(p.numel() for p in trainees["lora"].model.parameters() if p.requires_grad),
            "sft": trainees["sft_ag"].optimizer.num_weights,  # type: ignore[attr-defined]
        },
        "variants": {
            name: {
                **ratios(
                    seconds[name][INTERVAL:],
                    seconds["lora"][INTERVAL:],
                    [name == "sft_ag" and estimating for estimating in estimates[INTERVAL:]],
                ),
                "seconds": seconds[name][INTERVAL:],
            }
            for name in NAMES
        },
    }


def ratios(series: list[float], lora: list[float], estimates: list[bool]) -> dict[str, float]:
    """Return the median plain step as a ratio to LoRA's of the same round, and the share that reselection adds.

    Args:
        series: CPU seconds of a variant's steps, whole intervals.
        lora: Those of LoRA's.
        estimates: Which steps belong to an estimation phase.
    """
    is_last = [index % INTERVAL == INTERVAL - 1 for index in range(len(series))]
    is_special = [estimating or last for estimating, last in zip(estimates, is_last, strict=True)]
    rounds = list(zip(series, lora, is_special, strict=True))
    plain = statistics.median(seconds for seconds, _, special in rounds if not special)
    # The special steps against the median plain one: the noise of plain steps does not enter.
    extra = sum(seconds - plain for seconds, _, special in rounds if special)
    return {
        "plain_seconds": plain,
        "plain_ratio_to_lora": statistics.median(seconds / other for seconds, other, special in rounds if not special),
        "reselection_share": extra / (plain * len(series)),
    }


def check(result: dict[str, Any]) -> dict[str, bool]:
    """Which targets are met, of what was measured."""
    met = {}
    for name, one in result.get("times", {}).get("variants", {}).items():
        if name.startswith("sft"):
            met[f"{name}_time"] = one["plain_ratio_to_lora"] <= TIME_LIMIT
            met[f"{name}_reselection"] = one["reselection_share"] <= RESELECTION_LIMIT
    for part, title in (("peaks", "peak"), ("chunked_peaks", "chunked_peak")):
        for name, one in result.get(part, {}).items():
            if name.startswith("sft"):
                lora = result[part]["lora"]["plain"]["peak_bytes"]
                met[f"{name}_{title}"] = one["plain"]["peak_bytes"] <= lora
                met[f"{name}_{title}_while_estimating"] = one["estimating"]["peak_bytes"] <= lora
    return met


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--intervals", type=int, default=1, help="timed intervals of 20 steps")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="the others stay in the file")
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that it runs, measures nothing")
    parser.add_argument("--output", type=Path, help="where to write; results/sft.json")
    arguments = parser.parse_args()
    if arguments.intervals < 1:
        parser.error(f"--intervals {arguments.intervals} must be at least 1")
    if arguments.quick and arguments.output is None:
        parser.error("--quick measures nothing and needs --output, so that it replaces no result")
    torch.set_num_threads(1)
    sizes, rank = (QUICK, 4) if arguments.quick else (FULL, RANK)
    output = arguments.output or RESULTS / "sft.json"
    result = read_json(output)
    result |= {"environment": record_environment(), "sizes": dataclasses.asdict(sizes), "rank": rank}
    for title, checkpointing in (("plain", False), ("checkpointing", True)):
        part = result.setdefault(title, {})
        for name in ("peaks", "chunked_peaks"):
            if name in arguments.parts:
                chunked = name == "chunked_peaks"
                part[name] = count_peaks(sizes, rank, checkpointing=checkpointing, chunked=chunked)
        if "times" in arguments.parts:
            part["times"] = measure_times(sizes, rank, arguments.intervals, checkpointing=checkpointing)
        part["targets_met"] = check(part)
        print(title, part["targets_met"], flush=True)
    write_json(output, result)
    print(method_tables.sft(result), method_tables.sft_in_chunks(result), f"written to {output}", sep="\n\n")


if __name__ == "__main__":
    main()
