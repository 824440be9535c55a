"""Does a 32B train in full on 24 GiB with its state on an NVMe disk, and what does a step wait for? Simulated.

The real training step runs on tensors without data, and every copy, event and operator of it is written down in its
order, as in `schedule.py`; beside these the reads and writes of the groups' files, as the store of files asks its two
threads for them. That schedule is then played against a card's rates and a disk's: exposed is the time in which the
computing stream stands still, for copies or for the disk. HiFT, one layer a step, bf16 weights with fp32 masters,
activation checkpointing, two micro-batches of 1 x 2,048, the loss in chunks, and in NF4 the blocks whose turn it is
not; to make these dense for a product is an operator like any other. Means over a cycle in which every group has its
turn, embedding and head included.

- What is loaded ahead is what HiFT takes by itself of the memory that the plan and its allowance leave of the card.
- The disk has one rate that reading and writing share; beside it stand the same recording with the rate for each
  (`full`), and slower and faster disks.
- Not simulated: the time that the host takes to queue operators, and that copies and computation slow each other in the
  memory of the device. Operators reach a set share of the peak (`--efficiency`).

    OMP_NUM_THREADS=1 python benchmarks/disk_schedule.py                        # all rows, a quarter of an hour each
    OMP_NUM_THREADS=1 python benchmarks/disk_schedule.py --rows AdamW           # a part; the others stay in the file
    OMP_NUM_THREADS=1 python benchmarks/disk_schedule.py --quick --output trial.json   # a tiny model
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from markdown_table import markdown_table
from schedule import TINY, figures
from simulated_rows import add_host_bandwidth, make_parser, simulate_rows
from transformers import PreTrainedConfig

from slivertune.planning.cards import DISK_BANDWIDTH, Card, Duplex, card_named
from slivertune.planning.configs import find_model
from slivertune.planning.hift_schedule import HiFTSchedule, record_hift
from slivertune.planning.make import make_plan
from slivertune.planning.plan import add_allowance
from slivertune.planning.planned_time import with_room_ahead
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Begin, FileTransfer

MODEL = "qwen3-32b"
TOKENS_PER_SECOND, EXPOSED_SHARE = 600.0, 0.10
"""The target, at the first of the disks."""
ROWS = {
    "AdamW": {"optimizer": "adamw"},
    "8-bit AdamW": {"optimizer": "adamw8bit"},
    "AdamW, 128 GiB of state in memory": {"optimizer": "adamw", "state_ram_bytes": 128 * 2**30},
}
"""Fields of `PlanRequest`."""
SETTINGS = {
    "method": "hift",
    "precision": "mixed_hi",
    "seq_length": 2048,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "state": "disk",
    "waiting": "nf4",
}
OF_TINY = {"seq_length": 32, "stream_bytes": 2**14}


def disks(bandwidth: float) -> list[tuple[float, Duplex]]:
    """The disks that a schedule is played against; the first is that of the target."""
    return [(bandwidth, "half"), (bandwidth, "full"), (bandwidth / 2, "half"), (bandwidth / 4, "half")]


def simulate(
    name: str, config: PreTrainedConfig, card: Card, rates: dict[str, Any], *, is_quick: bool
) -> dict[str, Any]:
    """Plan a row, record it with the room that is left, and play it with every disk."""
    settings = {**SETTINGS, **ROWS[name], **(OF_TINY if is_quick else {})}
    request = PlanRequest(**settings)
    requirement = add_allowance(make_plan(request, config))
    run = with_room_ahead(requirement, card.memory_bytes).request
    num_tokens = request.batch_size * request.seq_length * request.gradient_accumulation_steps
    schedule = record_hift(run, config)
    result: dict[str, Any] = {
        "name": name,
        "settings": settings,
        "tokens": num_tokens,
        "peak_bytes": requirement.plan.peak_bytes,
        "allowance_bytes": requirement.allowance.total,
        "fits": requirement.device_bytes <= card.memory_bytes,
        "prefetch_bytes": run.prefetch_bytes,
        "pinned_host_bytes": requirement.host_bytes,
        "disk_bytes": requirement.disk_bytes,
        "disk_bytes_per_step": moved_in_a_step(schedule),
        "disks": [],
    }
    for bandwidth, duplex in disks(rates["disk_bandwidth"]):
        times = schedule.cycle(card.rates(**{**rates, "disk_bandwidth": bandwidth, "disk_duplex": duplex}))
        played = figures(schedule, times)
        if result["disks"]:
            del played["groups"]  # each group's own stand at the first disk
        tokens_per_second = num_tokens / played["step_seconds"]
        result["disks"].append(
            {"bandwidth": bandwidth, "duplex": duplex, "tokens_per_second": tokens_per_second, **played}
        )
    first = result["disks"][0]
    is_fast = first["tokens_per_second"] >= TOKENS_PER_SECOND and first["exposed_share"] <= EXPOSED_SHARE
    result["is_met"] = result["fits"] and is_fast
    return result


def moved_in_a_step(schedule: HiFTSchedule) -> dict[str, float]:
    """Bytes that each thread moves in the mean over the steps that count."""
    moved, step = Counter[str](), -1
    for each in schedule.entries:
        if isinstance(each, Begin):
            step = each.step
        elif isinstance(each, FileTransfer) and step in schedule.shares:
            moved[each.stream] += each.num_bytes
    return {thread: num_bytes / len(schedule.shares) for thread, num_bytes in moved.items()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people, in Markdown."""
    heads = ["State", "a GPU must have", "pinned host memory", "files", "disk", "s a step", "tokens/s", "exposed"]
    lines = []
    for row in rows:
        for disk in row["disks"]:
            cells = [
                row["name"],
                f"{(row['peak_bytes'] + row['allowance_bytes']) / 2**30:.2f} GiB",
                f"{row['pinned_host_bytes'] / 2**30:.1f} GiB",
                f"{row['disk_bytes'] / 2**30:.0f} GiB",
                f"{disk['bandwidth'] / 1e9:.3g} GB/s {'each way' if disk['duplex'] == 'full' else 'shared'}",
                f"{disk['step_seconds']:.3f}",
                f"{disk['tokens_per_second']:.0f}",
                f"{disk['exposed_share']:.1%}",
            ]
            lines.append(cells)
    return markdown_table(heads, lines)


def main() -> None:
    """Simulate, write the result after every row, and print the table."""
    parser = make_parser(__doc__, ROWS)
    add_host_bandwidth(parser)
    parser.add_argument("--disk_bandwidth", type=float, default=DISK_BANDWIDTH, help="bytes a second of the disk")
    arguments = parser.parse_args()
    names = ("efficiency", "bus_bandwidth", "host_bandwidth", "disk_bandwidth")
    rates = {name: getattr(arguments, name) for name in names}
    about = {"model": "tiny" if arguments.quick else MODEL, "card": arguments.card, "rates": rates}
    config = TINY if arguments.quick else find_model(MODEL).config

    def row(name: str) -> dict[str, Any]:
        return simulate(name, config, card_named(arguments.card), rates, is_quick=arguments.quick)

    print(table(simulate_rows(parser, arguments, "disk_schedule.json", list(ROWS), about, row)))


if __name__ == "__main__":
    main()
