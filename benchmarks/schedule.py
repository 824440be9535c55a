"""How much of HiFT's traffic over the bus a step has to wait for, simulated: Llama-3-8B on a card of 24 GiB.

The real training step runs on tensors without data, and every copy, event and operator of it is written down in its
order (`slivertune.planning.hift_schedule`). That schedule is then played against a card's rates: exposed is the time
in which the computing stream stands still. bf16 weights, fp32 masters, AdamW, activation checkpointing, the loss in
chunks; means over a cycle in which every group has its turn, embedding and head included.

- `budget` is what the card has beyond the planned peak and the allowance (`slivertune plan`); it is given to the run as
  `prefetch_bytes`. `before` is the same run with `prefetch_bytes=0`, which loads nothing ahead of the first gradient.
- With full duplex the bus has its rate each way at once; with half duplex both ways share it evenly.
- Not simulated: the time that the host takes to queue operators, and that copies and computation slow each other in the
  memory of the device. Operators reach a set share of the peak (`--efficiency`).

    OMP_NUM_THREADS=1 python benchmarks/schedule.py                               # all rows, an hour on one core
    OMP_NUM_THREADS=1 python benchmarks/schedule.py --rows "m = 1, 512 tokens"    # a part; the others stay in the file
    OMP_NUM_THREADS=1 python benchmarks/schedule.py --quick --output trial.json   # a tiny model, to see whether it runs
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from markdown_table import markdown_table
from simulated_rows import add_host_bandwidth, make_parser, simulate_rows
from transformers import LlamaConfig, PreTrainedConfig

from slivertune.planning.cards import Card, Duplex, card_named
from slivertune.planning.configs import find_model
from slivertune.planning.hift_schedule import HiFTSchedule, record_hift
from slivertune.planning.make import make_plan
from slivertune.planning.plan import add_allowance
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule_player import StepTime, exposed_share

MODEL = "llama-3-8b"
TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A run, and the share of its time that may be exposed with full duplex."""

    name: str
    target: float | None
    """None where none was set."""
    settings: dict[str, Any]
    """Fields of `PlanRequest`."""
    max_grad_norm: float | None = None
    """To which gradients are clipped."""


ALL_LAYERS = {"seq_length": 2048, "batch_size": 4, "layers_per_group": 34}
ROWS = (
    Row(name="m = 1, 512 tokens", target=0.05, settings={"seq_length": 512}),
    Row(name="m = 1, 1,024 tokens", target=0.02, settings={"seq_length": 1024}),
    Row(name="m = 1, 4,096 tokens", target=0.02, settings={"seq_length": 2048, "batch_size": 2}),
    Row(
        name="m = 8, 4,096 tokens, stepped in the backward",
        target=0.05,
        settings={"seq_length": 2048, "batch_size": 2, "layers_per_group": 8, "gradients": "stepped"},
    ),
    Row(
        name="m = 8, 4,096 tokens, clipped",
        target=None,
        settings={"seq_length": 2048, "batch_size": 2, "layers_per_group": 8, "gradients": "host"},
        max_grad_norm=1.0,
    ),
    Row(
        name="all layers, 4 x 8,192 tokens, clipped",
        target=None,
        settings={**ALL_LAYERS, "gradient_accumulation_steps": 4, "gradients": "host"},
        max_grad_norm=1.0,
    ),
    Row(
        name="all layers, 8 x 8,192 tokens, stepped in the last backward",
        target=0.03,
        settings={**ALL_LAYERS, "gradient_accumulation_steps": 8, "gradients": "stepped"},
    ),
    Row(
        name="all layers, 16 x 8,192 tokens, clipped",
        target=0.06,
        settings={**ALL_LAYERS, "gradient_accumulation_steps": 16, "gradients": "host"},
        max_grad_norm=1.0,
    ),
)


def request_of(row: Row, *, is_quick: bool) -> PlanRequest:
    """The run of a row."""
    settings = {"method": "hift", "precision": "mixed_hi", "gradient_checkpointing": True, **row.settings}
    if is_quick:
        num_layers = min(4, row.settings.get("layers_per_group", 1))
        num_backwards = min(2, row.settings.get("gradient_accumulation_steps", 1))
        settings |= {"seq_length": 32, "stream_bytes": 2**14}
        settings |= {"layers_per_group": num_layers, "gradient_accumulation_steps": num_backwards}
    return PlanRequest(**settings)


def simulate(
    row: Row, config: PreTrainedConfig, card: Card, rates: dict[str, Any], *, is_quick: bool
) -> dict[str, Any]:
    """Plan a row, record it with what memory is left and with none, and play both with full and half duplex."""
    request = request_of(row, is_quick=is_quick)
    requirement = add_allowance(make_plan(request, config))
    budget = card.memory_bytes - requirement.device_bytes
    result: dict[str, Any] = {
        "name": row.name,
        "settings": row.settings,
        "target": row.target,
        "tokens": request.batch_size * request.seq_length * request.gradient_accumulation_steps,
        "peak_bytes": requirement.plan.peak_bytes,
        "allowance_bytes": requirement.allowance.total,
        "budget_bytes": budget,
    }
    if budget < 0:
        return {**result, "fits": False}
    result["fits"] = True
    for name, num_bytes in (("prefetched", budget), ("before", 0)):
        run = dataclasses.replace(request, prefetch_bytes=num_bytes)
        schedule = record_hift(run, config, max_grad_norm=row.max_grad_norm)
        result[name] = {
            duplex: figures(schedule, schedule.cycle(card.rates(duplex=duplex, **rates))) for duplex in get_args(Duplex)
        }
    result["is_met"] = None if row.target is None else result["prefetched"]["full"]["exposed_share"] <= row.target
    return result


def figures(schedule: HiFTSchedule, times: Sequence[StepTime]) -> dict[str, Any]:
    """What a cycle came to: means over its steps, and each group's own."""
    causes: Counter[str] = Counter()
    for step in times:
        causes.update({f"{phase}: {cause}": seconds for (phase, cause), seconds in step.exposed_by.items()})
    return {
        "exposed_share": exposed_share(times),
        "step_seconds": math.fsum(step.total for step in times) / len(times),
        "exposed_seconds": math.fsum(step.exposed for step in times) / len(times),
        "exposed_by": {cause: seconds / len(times) for cause, seconds in causes.most_common()},
        "groups": [
            {
                "layers": schedule.groups[step.group],
                "seconds": step.total,
                "exposed_seconds": step.exposed,
                "exposed_by": {f"{phase}: {cause}": seconds for (phase, cause), seconds in step.exposed_by.items()},
            }
            for step in times
        ],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people, in Markdown, but for those of settings that were removed since they were simulated."""
    known = {row.name for row in ROWS}
    heads = ["Run", "left for prefetch", "s a step", "exposed", "half duplex", "nothing ahead", "half duplex", "target"]
    lines = []
    for row in (each for each in rows if each["name"] in known):
        target = "" if row["target"] is None else f"<= {row['target']:.0%}"
        if not row["fits"]:
            lines.append([row["name"], f"{-row['budget_bytes'] / 2**30:.2f} GiB too large", *[""] * 5, target])
            continue
        shares = [
            row[name][duplex]["exposed_share"] for name in ("prefetched", "before") for duplex in get_args(Duplex)
        ]
        cells = [
            row["name"],
            f"{row['budget_bytes'] / 2**30:.2f} GiB",
            f"{row['prefetched']['full']['step_seconds']:.3f}",
            *(f"{share:.1%}" for share in shares),
            target if row["is_met"] is not False else f"{target}, missed",
        ]
        lines.append(cells)
    return markdown_table(heads, lines)


def main() -> None:
    """Simulate, write the result after every row, and print the table."""
    by_name = {row.name: row for row in ROWS}
    parser = make_parser(__doc__, by_name)
    add_host_bandwidth(parser)
    arguments = parser.parse_args()
    rates = {name: getattr(arguments, name) for name in ("efficiency", "bus_bandwidth", "host_bandwidth")}
    about = {"model": "tiny" if arguments.quick else MODEL, "card": arguments.card, "rates": rates}
    config = TINY if arguments.quick else find_model(MODEL).config

    def row(name: str) -> dict[str, Any]:
        return simulate(by_name[name], config, card_named(arguments.card), rates, is_quick=arguments.quick)

    print(table(simulate_rows(parser, arguments, "schedule.json", list(by_name), about, row)))


if __name__ == "__main__":
    main()
