"""Tokens a second against tokens an update: HiFT's dial beside what a user would take instead, planned for a card.

A point is a card, a way of training and a number of tokens an update, for Llama-3.1-8B. The plan is that of `slivertune
plan`: the bytes of the real step, and its operators, copies and events played against the card's rates, in the mean
over a cycle of all groups. Nothing is measured. HiFT has bf16 weights, fp32 masters on the host and AdamW.

- Sequences have 512 tokens at 512 an update, 1,024 at 1,024, else 2,048. A micro-batch has the most of them, in powers
  of two, that fit the card beside the plan's allowance; the rest of an update is accumulated.
- Gradients of HiFT stay on the device where a micro-batch of one sequence fits so, else they go to the host.
- With gradient checkpointing and without are both planned where they fit; a point is the faster, and names the other.
- ZeRO-3 keeps weights and state on the host, which makes the update. Its time is the planner's. The planner counts its
  state on the device, so that the device's bytes are those of `with_state_on_host`.

Each point is written when it is done, and is not planned again without `--again`. All points of a card take an hour.

    OMP_NUM_THREADS=1 python benchmarks/curve.py --cards 4090
    OMP_NUM_THREADS=1 python benchmarks/curve.py --cards 4090 --settings m8 --tokens 4096 --again    # one point
    OMP_NUM_THREADS=1 python benchmarks/curve.py --quick --cards 4090 --tokens 1024 --output trial.json
"""

import argparse
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import plan_speeds
from environment import record_environment
from markdown_table import markdown_table
from result_files import read_json, write_json
from schedule import TINY
from simulated_rows import open_result
from transformers import PreTrainedConfig

from slivertune.planning.cards import EFFICIENCY, Card, card_named
from slivertune.planning.configs import find_model
from slivertune.planning.layers_per_group import count_layers
from slivertune.planning.make import make_plan
from slivertune.planning.methods import planned
from slivertune.planning.plan import Limits, MemoryRequirement, Moment, Plan, add_allowance
from slivertune.planning.planned_time import PlannedTime, play_run, record_run, with_room_ahead
from slivertune.planning.quiet import quiet_libraries
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Schedule

MODEL = "llama-3.1-8b"
CARDS = ("4090", "3090", "H100")
TOKENS = (512, 1024, 2048, 4096, 8192, 32768, 131072)
DIAL = (1, 2, 4, 5, 8, 9, 17)
"""Layers a group, beside all of them."""
STAYING = (5, 9, 17)
"""Of these, with 20 updates a turn, between which what has room of a group's state stays on the device."""
_LONGEST = 2048
_HIFT = {"method": "hift", "precision": "mixed_hi"}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"m{number}": {**_HIFT, "layers_per_group": number} for number in DIAL},
    **{f"m{number}-stays": {**_HIFT, "layers_per_group": number, "steps_per_group": 20} for number in STAYING},
    "all": _HIFT,
    "all-tokens": {**_HIFT, "token_ratio": 0.3},
    "lora": {"method": "lora", "precision": "bf16", "lora_rank": 64},
    "qlora": {"method": "lora", "precision": "bf16", "lora_rank": 64, "load_in_4bit": True},
    "sft": {"method": "sft", "precision": "bf16", "equivalent_lora_rank": 64},
    "zero3": {"method": "dense", "precision": "bf16", "layout": "zero3", "offload_parameters": True},
    "fsdp2": {"method": "dense", "precision": "mixed", "layout": "fsdp2", "offload_parameters": True},
}
"""Of `PlanRequest`; the number of layers is the model's."""
TITLES = {
    **{f"m{number}": f"HiFT, m = {number}" for number in DIAL},
    **{f"m{number}-stays": f"HiFT, m = {number}, 20 updates a turn" for number in STAYING},
    "all": "HiFT, all layers",
    "all-tokens": "HiFT, all layers, 30 % of the tokens",
    "lora": "LoRA, r 64",
    "qlora": "QLoRA, r 64",
    "sft": "SFT (AG), as LoRA r 64",
    "zero3": "ZeRO-3, all on the host",
    "fsdp2": "FSDP2, all on the host",
}
PUBLISHED_MODELS = ("llama-3-8b", "qwen-2.5-7b")
"""Those of `plan_speeds` that are about as large."""
_ZERO3_LIVE_WEIGHTS = 10**9
"""That ZeRO-3 leaves gathered (stage3_max_live_parameters)."""
_ZERO3_HOST_BYTES = 16
"""Of a weight: its fp32 master, two moments and gradient, which offload_optimizer keeps on the host."""


def with_state_on_host(plan: Plan, config: PreTrainedConfig) -> Plan:
    """What ZeRO-3 needs with `offload_optimizer` beside `offload_param`, on one GPU.

    The device has the gathered weights, the activations and the reduce bucket (the hidden size squared, "auto").

    Args:
        plan: Of ZeRO-3 with its parameters on the host.
        config: The model's configuration.
    """
    (group,) = plan.groups
    peak = Moment(
        group=group.index,
        phase="backward",
        parameters=2 * min(plan.num_parameters, _ZERO3_LIVE_WEIGHTS),
        gradients=2 * config.hidden_size**2,
        state=0,
        residual=group.activation_bytes,
    )
    return dataclasses.replace(plan, peak=peak, host_bytes=plan.host_bytes + _ZERO3_HOST_BYTES * plan.num_parameters)


class Planner:
    """Plans points, and each run that several of them ask for once.

    Args:
        config: The model's configuration.
        efficiency: Share of the card's peak that matrix products reach.
    """

    def __init__(self, config: PreTrainedConfig, efficiency: float) -> None:
        self._config, self._efficiency = config, efficiency
        self._num_layers = count_layers(PlanRequest(), config)
        self._plan, self._schedule = cache(self._make_plan), cache(self._record)

    def point(self, card_name: str, setting: str, num_tokens: int) -> dict[str, Any]:
        """Plan a point.

        Args:
            card_name: As `slivertune plan --gpu` takes it.
            setting: Of `SETTINGS`.
            num_tokens: Of an update.

        Returns:
            Plain JSON: what is needed to repeat it, bytes and, where it fits, the time of an update.
        """
        card = card_named(card_name)
        needs = [self._largest(setting, num_tokens, card, checkpointing=each) for each in (False, True)]
        fitting = [need for need in needs if need.fits(_limits(card))]
        point: dict[str, Any] = {"card": card_name, "setting": setting, "tokens": num_tokens, "fits": bool(fitting)}
        if not fitting:
            return {**point, **_memory(min(needs, key=lambda need: need.device_bytes))}
        timed = [(need, self._time(need, card)) for need in fitting]
        (need, time), *others = sorted(timed, key=lambda each: each[1].seconds)
        requests = [each.plan.request for each, _ in others]
        is_in_groups = planned(need.plan.request.method).trains_in_groups
        num_groups = sum(len(group.indices) for group in need.plan.groups) if is_in_groups else 1
        return {
            **point,
            **_memory(need),
            "prefetch_bytes": with_room_ahead(need, card.memory_bytes).request.prefetch_bytes,
            "efficiency": self._efficiency,
            "num_groups": num_groups,
            "seconds_per_update": time.seconds,
            "tokens_per_second": time.tokens_per_second,
            "weight_tokens_per_second": time.tokens_per_second / num_groups,
            "exposed_share": sum(time.waits.values()) / time.seconds,
            "slower": [
                {"settings": _settings(request), "seconds_per_update": other.seconds}
                for request, (_, other) in zip(requests, others, strict=True)
            ],
            "time": time.to_json(),
        }

    def _largest(self, setting: str, num_tokens: int, card: Card, *, checkpointing: bool) -> MemoryRequirement:
        """With the largest micro-batch that fits; or one sequence, which does not."""
        too_large = []
        for request in self._requests(setting, num_tokens, checkpointing=checkpointing):
            fitting = None
            for sized in _micro_batches(request, num_tokens):
                need = self._need(sized)
                if not need.fits(_limits(card)):
                    too_large.append(need)
                    break
                fitting = need
            if fitting is not None:
                return fitting
        return min(too_large, key=lambda need: need.device_bytes)

    def _requests(self, setting: str, num_tokens: int, *, checkpointing: bool) -> Iterator[PlanRequest]:
        """The way of training, in the order in which what fits is taken; one sequence a micro-batch."""
        largest_rank = self._config.hidden_size // 4  # bounds the rank of a tiny model alone
        settings = {
            **{
                name: min(value, largest_rank) if name.endswith("lora_rank") else value
                for name, value in SETTINGS[setting].items()
            },
            "seq_length": min(num_tokens, _LONGEST),
            "gradient_checkpointing": checkpointing,
        }
        if settings["method"] != "hift":
            yield PlanRequest(**settings)
            return
        settings["layers_per_group"] = min(settings.get("layers_per_group", self._num_layers), self._num_layers)
        yield PlanRequest(**settings, gradients="device")
        yield PlanRequest(**settings, gradients="host")

    def _need(self, request: PlanRequest) -> MemoryRequirement:
        """The third micro-batch is like the second, so that one plan serves all numbers of them."""
        plan = self._plan(dataclasses.replace(request, gradient_accumulation_steps=request.num_backwards))
        return add_allowance(dataclasses.replace(plan, request=request))

    def _make_plan(self, request: PlanRequest) -> Plan:
        plan = make_plan(request, self._config)
        return with_state_on_host(plan, self._config) if request.layout == "zero3" else plan

    def _record(self, request: PlanRequest) -> Schedule:
        return record_run(request, self._config)

    def _time(self, need: MemoryRequirement, card: Card) -> PlannedTime:
        plan = with_room_ahead(need, card.memory_bytes)
        return play_run(plan, self._schedule(plan.request), card.rates(efficiency=self._efficiency))


def _limits(card: Card) -> Limits:
    return Limits(device_bytes=card.memory_bytes)


def _micro_batches(request: PlanRequest, num_tokens: int) -> Iterator[PlanRequest]:
    """One sequence, two, four, up to all of an update."""
    num_sequences = num_tokens // request.seq_length
    for power in range(num_sequences.bit_length()):
        size = 2**power
        yield dataclasses.replace(request, batch_size=size, gradient_accumulation_steps=num_sequences // size)


def _settings(request: PlanRequest) -> dict[str, Any]:
    """What of a request is not its default."""
    return {
        field.name: getattr(request, field.name)
        for field in dataclasses.fields(request)
        if getattr(request, field.name) != field.default
    }


def _memory(need: MemoryRequirement) -> dict[str, Any]:
    return {
        "settings": _settings(need.plan.request),
        "peak_bytes": need.plan.peak_bytes,
        "peak_phase": need.plan.peak.phase,
        "need_bytes": need.device_bytes,
        "host_bytes": need.host_bytes,
    }


def published() -> list[dict[str, Any]]:
    """What others have published of models about as large, with sources; on the cards that they name or imply."""
    rows = []
    for group in plan_speeds.GROUPS:
        for row in group.rows:
            if row.model not in PUBLISHED_MODELS:
                continue
            settings = {"gradient_accumulation_steps": 1, **row.settings}
            rows.append(
                {
                    "card": group.card,
                    "name": row.name,
                    "model": row.model,
                    "method": row.settings["method"],
                    "source": group.source,
                    "assumed": group.assumed,
                    "tokens": settings["batch_size"] * settings["seq_length"] * settings["gradient_accumulation_steps"],
                    "tokens_per_second": row.tokens_per_second,
                }
            )
    return rows


def table(result: dict[str, Any]) -> str:
    """All rows in Markdown: seconds an update, tokens a second and what of the time waits; a table for each card."""
    tables = []
    for card in CARDS:
        points = {(each["setting"], each["tokens"]): each for each in result["points"] if each["card"] == card}
        if not points:
            continue
        counts = sorted({num_tokens for _, num_tokens in points})
        rows = [
            [TITLES[setting], *(_cell(points.get((setting, each))) for each in counts)]
            for setting in SETTINGS
            if any((setting, each) in points for each in counts)
        ]
        tables.append(markdown_table([f"{card}: tokens an update", *(f"{each:,}" for each in counts)], rows))
    published = (
        [row["name"], row["card"], f"{row['tokens']:,}", f"{row['tokens_per_second']:,.0f}", row["source"]]
        for row in result["published"]
    )
    tables.append(markdown_table(["Published", "Card", "Tokens an update", "Tokens a second", "Source"], published))
    return "\n\n".join(tables)


def _cell(point: dict[str, Any] | None) -> str:
    if point is None:
        return ""
    if not point["fits"]:
        return f"needs {point['need_bytes'] / 2**30:.1f} GiB"
    seconds, speed = point["seconds_per_update"], point["tokens_per_second"]
    return f"{seconds:.3g} s, {speed:,.0f}/s, {point['exposed_share']:.0%}"


def main() -> None:
    """Plan what is missing, write the result after every point, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=CARDS)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--tokens", nargs="+", type=int, choices=TOKENS, default=TOKENS, help="of an update")
    parser.add_argument("--again", action="store_true", help="plan points anew that are there")
    parser.add_argument("--efficiency", type=float, default=EFFICIENCY, help="share of the peak that is reached")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see whether it runs; needs --output")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    about = {"model": "tiny" if arguments.quick else MODEL, "efficiency": arguments.efficiency}
    output, kept = open_result(parser, arguments, "curve.json", about, "points of")
    by_key = {(each["card"], each["setting"], each["tokens"]): each for each in kept.get("points", [])}
    planner = Planner(TINY if arguments.quick else find_model(MODEL).config, arguments.efficiency)
    every = [(card, setting, tokens) for card in CARDS for setting in SETTINGS for tokens in TOKENS]
    for setting in arguments.settings:
        for tokens in arguments.tokens:
            for card in arguments.cards:
                if (card, setting, tokens) in by_key and not arguments.again:
                    continue
                with quiet_libraries():
                    point = planner.point(card, setting, tokens)
                by_key[card, setting, tokens] = point
                points = [by_key[key] for key in every if key in by_key]
                result = {"environment": record_environment(), **about, "published": published(), "points": points}
                write_json(output, result)
                print(f"{card}, {TITLES[setting]}, {tokens:,} tokens: {_cell(point)}", flush=True)
    print(table(read_json(output)))


if __name__ == "__main__":
    main()
