"""Planned tokens/s by the formula against those of the simulator that it replaces.

- `curve`, `ways`: every row of `results/curve.json` and `results/ways_8b_4090.json`, whose figures are the simulator's.
- `drawn`: rows drawn by a seed from ten models of 4 to 8 blocks in their full width, cards, methods and settings.
- `auto`: the choice of `--layers_per_group auto` in draws, by the formula and by the simulator.

A simulated figure that `results/time_gate.json` has is not simulated again.

    OMP_NUM_THREADS=1 python benchmarks/time_gate.py --parts drawn auto
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

from result_files import RESULTS, read_json, write_json
from transformers import PreTrainedConfig

from slivertune.planning import layers_per_group
from slivertune.planning.cards import Card, Rates, card_named
from slivertune.planning.configs import find_model
from slivertune.planning.make import make_plan
from slivertune.planning.plan import Limits, Plan, add_allowance
from slivertune.planning.planned_time import play_run, record_run, with_room_ahead
from slivertune.planning.quiet import quiet_libraries
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule_player import UpdateTime
from slivertune.planning.time_formula import mean_update

OUTPUT = RESULTS / "time_gate.json"
SEED, NUM_ROWS, NUM_CHOICES = 31, 60, 30
MIB, GIB = 2**20, 2**30
MODELS = (
    *("llama-2-7b", "llama-3.1-8b", "llama-3.2-1b", "mistral-7b", "qwen3-4b", "qwen3-30b-a3b", "smollm3-3b"),
    *("gpt2-large", "opt-13b", "roberta-large"),
)
CARDS = ("3090", "4060Ti-16GB", "4090", "A100-80GB", "H100")
Row = dict[str, Any]


@cache
def config_of(model: str, num_blocks: int | None = None) -> PreTrainedConfig:
    """The configuration of a model with fewer blocks."""
    config = find_model(model).config
    if num_blocks is not None:
        for name in ("layer_types", "no_rope_layers"):
            if getattr(config, name, None) is not None:
                setattr(config, name, getattr(config, name)[:num_blocks])
        config.num_hidden_layers = num_blocks
    return config


def draw(seed: int) -> Iterator[Row]:
    """Draw rows that a plan takes, without end."""
    random_of = random.Random(seed)
    pick = random_of.choice
    while True:
        model = pick(MODELS)
        method = pick(["hift"] * 8 + ["sft", "sft", "lora", "lora", "dense", "dense"])
        settings: Row = {
            "method": method,
            "task": "classification" if model == "roberta-large" else "causal_lm",
            "precision": {"hift": "mixed_hi", "dense": "mixed"}.get(method, "bf16"),
            "seq_length": pick((128, 256, 512)),
            "batch_size": pick((1, 2, 4, 8)),
            "gradient_accumulation_steps": pick((1, 1, 1, 2, 4, 8)),
            "gradient_checkpointing": pick((False, True)),
            "token_ratio": pick((None, None, None, 0.3)),
        }
        if method == "hift":
            settings |= {
                "layers_per_group": pick((1, 2, 4, 10)),
                "gradients": pick(("device", "device", "host", "stepped")),
                "state": pick(("host", "host", "host", "disk", "discard", "device")),
                "weights": pick(("device", "device", "device", "host")),
                "steps_per_group": pick((1, 1, 4, 20)),
                "prefetch_bytes": pick((0, 512 * MIB, GIB, 4 * GIB, 64 * GIB)),
            }
        layout = pick(["single"] * 6 + ["zero3", "zero3", "ddp"])
        if layout != "single":
            settings |= {"layout": layout, "num_gpus": pick((2, 4))}
            settings |= {"offload_parameters": layout == "zero3" and pick((False, True))}
        row = {"model": model, "blocks": pick((4, 6, 8)), "card": pick(CARDS), "settings": settings}
        if method == "hift":
            settings["layers_per_group"] = min(settings["layers_per_group"], row["blocks"] + 2)
        try:
            PlanRequest(**settings)
        except ValueError:
            continue
        yield row


def simulated(plan: Plan, config: PreTrainedConfig, rates: Rates) -> Row:
    """What the simulator says of a run."""
    planned = play_run(plan, record_run(plan.request, config), rates)
    return {"tokens_per_second": planned.tokens_per_second, "computing": planned.computing, "waiting": planned.waits}


def by_formula(plan: Plan, rates: Rates) -> Row:
    """What the formula says of a run."""
    request, mean = plan.request, mean_update(plan, rates)
    num_tokens = request.batch_size * request.seq_length * request.gradient_accumulation_steps * request.num_gpus
    return {
        "tokens_per_second": num_tokens / mean.seconds,
        "computing": dict(mean.computing),
        "waiting": dict(mean.waiting),
    }


def compared(row: Row, before: Row, now: Row) -> Row:
    """A row with both figures."""
    ratio = now["tokens_per_second"] / before["tokens_per_second"]
    return {**row, "simulated": before, "formula": now, "error": ratio - 1}


def kept_rows(part: str) -> Iterator[Row]:
    """Rows whose simulated figures are kept: those of `curve.json` and of `ways_8b_4090.json`."""
    config = config_of("llama-3.1-8b")
    plan_of = cache(lambda request: make_plan(request, config))
    for kept in read_json(RESULTS / f"{part}.json")["points" if part == "curve" else "rows"]:
        if not kept["fits"]:
            continue
        given = dict(kept["settings"] if part == "curve" else kept["request"])
        assert given.pop("update", "step") == "step"  # is gone
        request = PlanRequest(**{name: tuple(each) if isinstance(each, list) else each for name, each in given.items()})
        card = card_named(kept.get("card", "4090"))
        # The third micro-batch is like the second, and one plan serves all cards.
        plan = replace(plan_of(replace(request, gradient_accumulation_steps=request.num_backwards)), request=request)
        if part == "curve":
            plan = replace(plan, request=replace(request, prefetch_bytes=kept["prefetch_bytes"]))
        else:
            plan = with_room_ahead(add_allowance(plan), card.memory_bytes)
        row = {"name": f"{kept['card']}, {kept['setting']}, {kept['tokens']}" if part == "curve" else kept["title"]}
        time = kept["time"]
        before = {
            "tokens_per_second": time["tokens_per_second"],
            "computing": time["computing_seconds"],
            "waiting": time["waiting_seconds"],
        }
        yield compared(row, before, by_formula(plan, card.rates()))


def drawn_rows(known: dict[str, Row]) -> Iterator[Row]:
    """Rows that are drawn."""
    rows = draw(SEED)
    for number in range(NUM_ROWS):
        row = {"name": f"draw {number}", **next(rows)}
        config, rates = config_of(row["model"], row["blocks"]), card_named(row["card"]).rates()
        settings = {key: value for key, value in row.items() if key != "name"}
        plan, kept = make_plan(PlanRequest(**row["settings"]), config), known.get(row["name"])
        is_kept = kept is not None and {key: kept[key] for key in settings} == settings
        before = kept["simulated"] if kept is not None and is_kept else simulated(plan, config, rates)
        yield compared(row, before, by_formula(plan, rates))


def chosen_rows(known: dict[str, Row]) -> Iterator[Row]:
    """Choices of `--layers_per_group auto`."""
    rows, random_of, number = draw(SEED + 1), random.Random(SEED + 1), 0
    while number < NUM_CHOICES:
        row, share = next(rows), random_of.choice((1.1, 1.5, 2.0, 4.0, 8.0))
        settings = row["settings"] | {"state": "host", "prefetch_bytes": 0, "layers_per_group": 1}
        # The simulator runs a cycle for each trial, and every micro-batch.
        settings["gradient_accumulation_steps"] = min(2, settings["gradient_accumulation_steps"])
        row["blocks"] = min(6 if number < 8 else 4, row["blocks"])
        if settings["method"] != "hift" or settings.get("layout", "single") != "single":
            continue
        if row["model"] == "qwen3-30b-a3b":
            continue  # each trial simulates its 128 experts for minutes
        row = {"name": f"choice {number}", **row, "settings": settings, "limit": share}
        number += 1
        request, config = PlanRequest(**settings), config_of(row["model"], row["blocks"])
        card = card_named(row["card"])
        limits = Limits(device_bytes=int(share * add_allowance(make_plan(request, config)).device_bytes))
        kept = known.get(row["name"])
        if kept is not None and {key: kept[key] for key in row} == row:
            before = kept["simulated"]
        else:
            before = layers_per_group.choose_layers_per_group(request, config, card, limits).to_json()
        with mock.patch.object(layers_per_group, "_play", _play_by_formula):
            now = layers_per_group.choose_layers_per_group(request, config, card, limits).to_json()
        tried = [each["layers_per_group"] for each in max(before["trials"], now["trials"], key=len)]
        distance = abs(tried.index(before["layers_per_group"]) - tried.index(now["layers_per_group"]))
        yield {**row, "simulated": before, "formula": now, "distance": distance}


def _play_by_formula(request: PlanRequest, config: PreTrainedConfig, card: Card) -> list[UpdateTime]:
    mean = mean_update(make_plan(request, config), card.rates())
    waiting = sum(mean.waiting.values())
    return [UpdateTime({**mean.computing, "step": mean.computing["step"] + waiting}, {("step", "copies"): waiting})]


def main() -> None:
    """Compare, write the result after each row, and print what misses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[dict[str, Row]], Iterator[Row]]] = {
        "curve": lambda known: kept_rows("curve"),
        "ways_8b_4090": lambda known: kept_rows("ways_8b_4090"),
        "drawn": drawn_rows,
        "auto": chosen_rows,
    }
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    arguments = parser.parse_args()
    begin, result = time.monotonic(), read_json(OUTPUT)
    for part in arguments.parts:
        known = {row["name"]: row for row in result.get(part, [])}
        with quiet_libraries():
            for row in parts[part](known):
                known[row["name"]] = row
                result[part] = list(known.values())
                write_json(OUTPUT, result)
                print(part, row["name"], row.get("error", row.get("distance")), flush=True)
                if time.monotonic() - begin > arguments.seconds:
                    return


if __name__ == "__main__":
    main()
