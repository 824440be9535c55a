"""Planned seconds of an update against measured ones, on a CPU that one dense run has calibrated.

The rates of this CPU are taken from dense fine-tuning alone: bytes a second from its AdamW step, whose bytes are known,
then operations a second from its forward and backward. With these two figures and nothing else, the schedules of other
methods on the same model are played, and their real updates timed (target: each within 15 %). State stays on the
device, since a CPU has no bus. For HiFT the mean is that of a cycle, for SFT that of the updates from one reselection
to the next.

    OMP_NUM_THREADS=1 python benchmarks/plan_time.py                    # about ten minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/plan_time.py --quick --output trial.json

CPU time of the process on one thread: of each update in its period the median over rounds, and the mean of these.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from environment import record_environment
from markdown_table import markdown_table
from peft import LoraConfig, get_peft_model
from result_files import RESULTS, write_json
from transformers import LlamaConfig, LlamaForCausalLM

import slivertune as st
from slivertune.planning.cards import Rates
from slivertune.planning.recorded_run import record_schedule
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Schedule
from slivertune.planning.schedule_player import mean_update

TARGET = 0.15
MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "tie_word_embeddings": False,
}
QUICK: dict[str, Any] = {
    **MODEL,
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
INTERVAL, ESTIMATION, DENSITY = 8, 3, 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A way of training."""

    name: str
    settings: dict[str, Any]
    """Of the plan."""
    period: Callable[[int], int] = lambda num_layers: 1
    """Updates after which all repeats."""


ROWS = (
    Row(name="dense", settings={"method": "dense"}),
    Row(
        name="HiFT, 1 layer a step",
        settings={"method": "hift", "state": "device"},
        period=lambda num_layers: num_layers,
    ),
    Row(
        name="HiFT, 4 layers a step",
        settings={"method": "hift", "state": "device", "layers_per_group": 4},
        period=lambda num_layers: -(-num_layers // 4),
    ),
    Row(
        name="SFT (AG)",
        settings={
            "method": "sft",
            "density": DENSITY,
            "reselection_interval": INTERVAL,
            "estimation_steps": ESTIMATION,
        },
        period=lambda num_layers: INTERVAL,
    ),
    Row(name="LoRA", settings={"method": "lora", "lora_rank": 16}),
    Row(name="dense, TokenTune", settings={"method": "dense", "token_ratio": 0.3}),
)


class Trainee:
    """A model that is trained in a row's way.

    Args:
        row: The way.
        config: The model's.
        batch: What it trains on.
    """

    def __init__(self, row: Row, config: LlamaConfig, batch: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(0)
        self._batch = batch
        model: Any = LlamaForCausalLM(config)
        model.config.use_cache = False
        method = row.settings["method"]
        if method == "lora":
            adapters = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
            model = get_peft_model(model, adapters)
        self._model = model.train()
        self._optimizer = self._make_optimizer(row)
        st.chunked_loss.attach_chunked_cross_entropy(self._model)
        if "token_ratio" in row.settings:
            st.TokenTune(ratio=row.settings["token_ratio"]).attach(self._model)

    def _make_optimizer(self, row: Row) -> torch.optim.Optimizer:
        method = row.settings["method"]
        if method == "hift":
            config = st.HiFTConfig(state="device", layers_per_group=row.settings.get("layers_per_group", 1))
            return st.HiFT(self._model, torch.optim.AdamW, config=config, lr=1e-5, fused=True)
        if method == "sft":
            settings = {name: value for name, value in row.settings.items() if name != "method"}
            return st.SFT(self._model, config=st.SFTConfig(**settings), lr=1e-5, total_steps=10_000)
        trained = [each for each in self._model.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def update(self) -> tuple[float, float]:
        """Seconds of forward and backward, and of the optimizer's step."""
        start = time.process_time()
        self._model(**self._batch).loss.backward()
        middle = time.process_time()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return middle - start, time.process_time() - middle


def calibrate(schedule: Schedule, computing: float, stepping: float) -> Rates:
    """Rates at which dense fine-tuning takes what was measured.

    Args:
        schedule: Of dense fine-tuning.
        computing: Seconds of its forward and backward.
        stepping: Seconds of its optimizer's step.
    """
    fast = 1e18

    def played(flops: float, bandwidth: float) -> dict[Any, float]:
        rates = Rates(flops=flops, memory_bandwidth=bandwidth, bus_bandwidth=bandwidth)
        return dict(mean_update(schedule, rates).seconds)

    bandwidth = played(fast, 1.0)["step"] / stepping
    low, high = 1e6, fast
    for _ in range(100):
        middle = (low * high) ** 0.5
        seconds = played(middle, bandwidth)
        low, high = (middle, high) if seconds["forward"] + seconds["backward"] > computing else (low, middle)
    return Rates(flops=low, memory_bandwidth=bandwidth, bus_bandwidth=bandwidth)


def measure(row: Row, config: LlamaConfig, batch: dict[str, torch.Tensor], num_rounds: int) -> list[list[float]]:
    """Of each update in a period the medians over rounds, of forward and backward, and of the step; after a first."""
    trainee = Trainee(row, config, batch)
    period = row.period(config.num_hidden_layers + 2)
    rounds = [[trainee.update() for _ in range(period)] for _ in range(num_rounds + 1)][1:]
    return [[statistics.median(each[place][part] for each in rounds) for part in range(2)] for place in range(period)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows that dense training does not calibrate, in Markdown."""
    lines = []
    for row in rows:
        if row["is_met"] is not None:
            seconds = (sum(row[part].values()) for part in ("measured_seconds", "planned_seconds"))
            lines.append([row["name"], *(f"{each:.3f} s" for each in seconds), f"{100 * row['error']:+.1f} %"])
    return markdown_table(["", "measured", "planned", "error"], lines)


def main() -> None:
    """Calibrate, measure, write the result after every row, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=5, help="periods that count; dense and LoRA take eight times as many"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see whether it runs; needs --output")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.quick and arguments.output is None:
        parser.error("--quick needs --output FILE: a trial is not written among the results")
    torch.set_num_threads(1)
    config = LlamaConfig(**(QUICK if arguments.quick else MODEL))
    sizes = {"batch_size": 2, "seq_length": 16 if arguments.quick else 128}
    tokens = torch.randint(config.vocab_size, (sizes["batch_size"], sizes["seq_length"]))
    batch = {"input_ids": tokens, "labels": tokens}
    rows: list[dict[str, Any]] = []
    rates: Rates | None = None
    for row in ROWS:
        schedule = record_schedule(PlanRequest(precision="fp32", kernels="cpu", **sizes, **row.settings), config)
        num_rounds = arguments.rounds * (8 if row.period(10) == 1 else 1)
        times = measure(row, config, batch, 2 if arguments.quick else num_rounds)
        computing, stepping = (statistics.fmean(each[part] for each in times) for part in range(2))
        if rates is None:
            rates = calibrate(schedule, computing, stepping)
        planned = mean_update(schedule, rates)
        error = planned.total / (computing + stepping) - 1
        rows.append(
            {
                "name": row.name,
                "settings": row.settings,
                "measured_seconds": {"forward and backward": computing, "step": stepping},
                "planned_seconds": dict(planned.seconds),
                "error": error,
                "is_met": None if row is ROWS[0] else abs(error) <= TARGET,
            }
        )
        about = {"model": config.to_diff_dict(), **sizes, "rates": dataclasses.asdict(rates), "target": TARGET}
        output = arguments.output or RESULTS / "plan_time.json"
        write_json(output, {"environment": record_environment(), **about, "rows": rows})
        print(
            f"{row.name}: {computing + stepping:.3f} s measured, {planned.total:.3f} s planned, {error:+.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
