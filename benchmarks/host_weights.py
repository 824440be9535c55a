"""What streaming weights from the host costs a step, simulated: FSDP2's way on one rank, and how it could be at best.

HiFT's real step runs on tensors without data and is written down with marks where it comes to a unit's weights
(`weight_moments.py`). Into that schedule go the copies of

- `fsdp2`: FSDP2 with `CPUOffloadPolicy`, as torch's source has them (`fsdp2_copies.py`); the update is the host's;
- `ideal`: a streamer with two buffers, and as many resident blocks as fit (`ideal_streamer.py`);

and each is played against a card's rates. One layer a step, bf16 weights, fp32 masters, AdamW, activation
checkpointing, the loss in chunks; means over a cycle. Not simulated: what `benchmarks/schedule.py` does not either.

    OMP_NUM_THREADS=1 python benchmarks/host_weights.py                                # all rows, an hour on one core
    OMP_NUM_THREADS=1 python benchmarks/host_weights.py --rows "qwen3-32b, 512"        # a part; others stay in the file
    OMP_NUM_THREADS=1 python benchmarks/host_weights.py --quick --output trial.json    # a tiny model: does it run?
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdp2_copies import TORCH, with_fsdp2
from ideal_streamer import NUM_BUFFERS, lowest, spread, with_streamer
from markdown_table import markdown_table
from schedule import TINY
from simulated_rows import make_parser, simulate_rows
from transformers import PreTrainedConfig
from weight_moments import Moment, WeightMoments

from slivertune.planning.cards import HOST_BANDWIDTH, Card, Rates, card_named
from slivertune.planning.configs import find_model
from slivertune.planning.gathered_units import GatheredUnit, units_of
from slivertune.planning.hift_schedule import record_sample
from slivertune.planning.make import built, make_plan
from slivertune.planning.plan import Plan, add_allowance
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Begin, Entry, Schedule, Work
from slivertune.planning.schedule_player import UpdateTime, mean_update
from slivertune.planning.schedule_recorder import ScheduleRecorder

MODELS = ("llama-3-8b", "llama-2-13b", "qwen3-32b")
BATCHES = {512: (1, 512), 2048: (1, 2048), 4096: (2, 2048), 8192: (4, 2048)}
"""By tokens of a step: sequences, and their length."""
ROWS = tuple(f"{model}, {tokens}" for model in MODELS for tokens in BATCHES)
HOST_STEP_BYTES = 28
"""AdamW on the host reads a weight's master, gradient and both moments, and writes all but the gradient; fp32."""
LIMIT = 0.10
"""Of the step: what FSDP2's copies may take before a streamer of our own is worth its lines."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A schedule with marks."""

    schedule: Schedule
    moments: Mapping[int, Moment]
    unit_bytes: tuple[int, ...]
    stays: tuple[bool, ...]
    blocks: tuple[int, ...]
    """Units that are blocks, from the bottom up."""

    def play(self, entries: Sequence[Entry], rates: Rates) -> UpdateTime:
        """An update in the mean over the cycle."""
        return mean_update(dataclasses.replace(self.schedule, entries=entries), rates)


def request_of(row: str, *, is_quick: bool) -> PlanRequest:
    """The run of a row."""
    batch_size, seq_length = BATCHES[int(row.split(", ")[1])]
    quick = {"seq_length": 32, "stream_bytes": 2**14} if is_quick else {}
    return PlanRequest(
        method="hift",
        precision="mixed_hi",
        gradient_checkpointing=True,
        **{"batch_size": batch_size, "seq_length": seq_length, **quick},
    )


def record(request: PlanRequest, config: PreTrainedConfig) -> Recorded:
    """Run the turns from which a cycle's mean follows."""
    recorder = ScheduleRecorder()
    moments: dict[int, Moment] = {}

    def mark(moment: Moment) -> None:
        moments[recorder.record("computing")] = moment

    with built(request, config) as (model, forward):
        units = in_order(model)
        WeightMoments(units, mark)
        shares = record_sample(request, model, forward, recorder)
    return Recorded(
        schedule=Schedule(entries=recorder.entries, shares=shares),
        moments=moments,
        unit_bytes=tuple(unit.num_bytes for unit in units),
        stays=tuple(unit.stays for unit in units),
        blocks=tuple(range(1, len(units) - 1)),
    )


def in_order(model: Any) -> list[GatheredUnit]:
    """The units that accelerate makes of a causal model: embedding, blocks, head."""
    *blocks, bottom, head, rest = units_of(model)
    if rest.parameters or bottom.modules[0] is not model.get_input_embeddings():
        raise ValueError("this benchmark knows models of an embedding, blocks, and a head that is not tied to it")
    return [bottom, *reversed(blocks), head]


def simulate(
    row: str, config: PreTrainedConfig, card: Card, given: dict[str, Any], *, is_quick: bool
) -> dict[str, Any]:
    """Plan a row, record it, put both kinds of copies in, and play them."""
    request = request_of(row, is_quick=is_quick)
    plan = add_allowance(make_plan(request, config))
    trained = mean_trained(plan.plan)
    recorded = record(request, config)
    block_bytes = recorded.unit_bytes[recorded.blocks[0]]
    state_bytes = 6 * block_bytes  # master and two moments in fp32
    room = card.memory_bytes - plan.device_bytes + block_bytes * len(recorded.blocks)
    rates = card.rates(**given)
    computing = computing_only(recorded)
    alone = recorded.play(computing, rates)
    result: dict[str, Any] = {
        "name": row,
        "tokens": request.batch_size * request.seq_length,
        "peak_bytes_with_all_weights": plan.device_bytes,
        "num_blocks": len(recorded.blocks),
        "block_bytes": block_bytes,
        "computing_seconds": alone.total,
        "fsdp2": fsdp2_figures(recorded, rates, trained),
        "ideal": {},
    }
    # Whether the state's room is kept for it, or given to weights: whichever is faster.
    for keeps_state in (True, False):
        prefetch = state_bytes if keeps_state else 0
        run = record(dataclasses.replace(request, prefetch_bytes=prefetch), config) if prefetch else recorded
        for rule in (spread, lowest):
            figures = ideal_figures(run, rates, room - prefetch, rule)
            if figures is not None:
                result["ideal"][f"{rule.__name__}, {'state ahead' if keeps_state else 'no state ahead'}"] = figures
    return result


def computing_only(recorded: Recorded) -> list[Entry]:
    """The schedule without any copy."""
    return [
        each
        for each in recorded.schedule.entries
        if isinstance(each, Begin) or (isinstance(each, Work) and each.stream == "computing")
    ]


def mean_trained(plan: Plan) -> float:
    """Weights that an update trains, in the mean over a cycle."""
    counts = [len(group.indices) for group in plan.groups]
    return sum(group.num_parameters * count for group, count in zip(plan.groups, counts, strict=True)) / sum(counts)


def fsdp2_figures(recorded: Recorded, rates: Rates, num_trained: float) -> dict[str, Any]:
    """What FSDP2's way takes."""
    entries = with_fsdp2(recorded.schedule.entries, recorded.moments, recorded.unit_bytes, recorded.stays)
    without = [
        each
        for each in entries
        if isinstance(each, Begin | Work) and not (isinstance(each, Work) and each.stream != "computing")
    ]
    passes, alone = recorded.play(entries, rates), recorded.play(without, rates)
    update = HOST_STEP_BYTES * num_trained / HOST_BANDWIDTH
    copies = passes.total - alone.total
    seconds = passes.total + update
    return {
        "step_seconds": seconds,
        "copies_seconds": copies,
        "host_update_seconds": update,
        "lost_to_copies": copies / seconds,
        "lost": (copies + update) / seconds,
    }


def ideal_figures(
    recorded: Recorded, rates: Rates, room: int, rule: Callable[[int, int], frozenset[int]]
) -> dict[str, Any] | None:
    """What a streamer takes; None if not even its buffers fit."""
    block_bytes, num_blocks = recorded.unit_bytes[recorded.blocks[0]], len(recorded.blocks)
    num_resident = room // block_bytes
    if num_resident < num_blocks:
        num_resident -= NUM_BUFFERS
    if num_resident < 0:
        return None
    num_streamed = max(0, num_blocks - num_resident)
    streamed = frozenset(recorded.blocks[place] for place in rule(num_blocks, num_streamed)) if num_streamed else set()
    entries = with_streamer(recorded.schedule.entries, recorded.moments, recorded.unit_bytes, frozenset(streamed))
    update = recorded.play(entries, rates)
    return {
        "num_resident": num_blocks - num_streamed,
        "step_seconds": update.total,
        "exposed_seconds": update.exposed,
        "exposed_share": update.exposed / update.total,
        "exposed_by": {f"{phase}: {cause}": seconds for (phase, cause), seconds in update.exposed_by.items()},
    }


def best_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest of a row's streamers."""
    return min(row["ideal"].values(), key=lambda each: each["step_seconds"], default=None)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people, in Markdown."""
    heads = ["Model, tokens a step", "computing, s", "FSDP2, s", "of it copies", "and the host's update"]
    heads += ["streamer, s", "exposed", "resident blocks"]
    lines = []
    for row in rows:
        fsdp2, ideal = row["fsdp2"], best_of(row)
        cells = [
            f"{row['name'].split(', ')[0]}, {row['tokens']:,}",
            f"{row['computing_seconds']:.2f}",
            f"{fsdp2['step_seconds']:.2f}",
            f"{fsdp2['lost_to_copies']:.0%}",
            f"{fsdp2['lost']:.0%}",
        ]
        if ideal is None:
            cells += ["does not fit", "", ""]
        else:
            cells += [
                f"{ideal['step_seconds']:.2f}",
                f"{ideal['exposed_share']:.0%}",
                f"{ideal['num_resident']} of {row['num_blocks']}",
            ]
        lines.append(cells)
    return markdown_table(heads, lines)


def main() -> None:
    """Simulate, write the result after every row, and print the table."""
    parser = make_parser(__doc__, ROWS)
    arguments = parser.parse_args()
    given = {"efficiency": arguments.efficiency, "bus_bandwidth": arguments.bus_bandwidth}
    about = {"card": arguments.card, "rates": given, "host_bandwidth": HOST_BANDWIDTH, "fsdp2_of_torch": TORCH}

    def row(name: str) -> dict[str, Any]:
        config = TINY if arguments.quick else find_model(name.split(", ", maxsplit=1)[0]).config
        return simulate(name, config, card_named(arguments.card), given, is_quick=arguments.quick)

    print(table(simulate_rows(parser, arguments, "host_weights.json", list(ROWS), about, row, verdict)))


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether a streamer is needed by what all rows lose."""
    least = min(each["fsdp2"]["lost_to_copies"] for each in rows)
    return {"verdict": {"limit": LIMIT, "least_lost_by_fsdp2": least, "needs_a_streamer": least > LIMIT}}


if __name__ == "__main__":
    main()
