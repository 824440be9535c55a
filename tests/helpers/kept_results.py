"""What the files under benchmarks/results/ come to, worked out apart from the scripts that print their tables."""

import json
import math
import statistics
import sys
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slivertune.training.embedded.base_model import BASE_RECIPE, VOCABULARY_SIZE
from tests.conftest import CHECKOUT

sys.path.append(str(CHECKOUT / "benchmarks"))
from evidence_rows import read_rows_file, times_as_many_updates
from planned_map import RESULT


@cache
def result(name: str) -> dict[str, Any]:
    return dict(json.loads((CHECKOUT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")))


Best = dict[str, tuple[float, list[float]]]


@cache
def dial(task: str) -> Best:
    """By layers per group: the best rate that all seeds ran and none diverged at, and what each came to there."""
    part = result("dial")[task]
    figure, sign = part["fixed"]["figure"], 1 if task == "language" else -1
    best: Best = {}
    for m in part["bytes"]:
        by_rate: dict[float, list[dict[str, Any]]] = {}
        for run in part["runs"]:
            if str(run["layers_per_group"]) == m:
                by_rate.setdefault(run["learning_rate"], []).append(run)
        ended = [
            (rate, [run[figure] for run in runs])
            for rate, runs in by_rate.items()
            if len(runs) == 3 and not any(run["diverged"] for run in runs)
        ]
        best[m] = min(ended, key=lambda each: sign * statistics.fmean(each[1]))
    return best


def dial_mean(task: str, m: str) -> float:
    return statistics.fmean(dial(task)[m][1])


def dial_updates(m: str) -> int:
    """Updates on the language reference in the CPU time of all settings."""
    (number,) = {run["num_updates"] for run in result("dial")["language"]["runs"] if str(run["layers_per_group"]) == m}
    return int(number)


def spread_of_sst2() -> float:
    """Points between the best and the worst setting."""
    means = [100 * dial_mean("sst2", m) for m in dial("sst2")]
    return max(means) - min(means)


def error_of_sst2() -> float:
    """Points of standard error of one accuracy."""
    share = statistics.fmean(dial_mean("sst2", m) for m in dial("sst2"))
    return 100 * math.sqrt(share * (1 - share) / result("dial")["sst2"]["fixed"]["num_rows"]["evaluation"])


def diverged(rate: float, m: str) -> bool:
    """Whether the first seed of the language reference did."""
    (found,) = [
        run["diverged"]
        for run in result("dial")["language"]["runs"]
        if (run["seed"], run["learning_rate"], str(run["layers_per_group"])) == (0, rate, m)
    ]
    return bool(found)


def waiting_differences(task: str, form: str, m: int, place: str) -> list[float]:
    """Of each seed, against exact layers."""
    part = result("waiting")[task]
    values = {
        (run["form"], run["seed"]): run[place][part["figure"]] for run in part["runs"] if run["layers_per_group"] == m
    }
    return [values[form, seed] - values["exact", seed] for seed in (0, 1, 2)]


def waiting_range(task: str, m: int) -> float:
    """How far the seeds of exact layers lie apart."""
    part = result("waiting")[task]
    exact = [
        run["on_device"][part["figure"]]
        for run in part["runs"]
        if (run["form"], run["layers_per_group"]) == ("exact", m)
    ]
    return float(max(exact) - min(exact))


def largest_difference_when_exact() -> float:
    means = [
        statistics.fmean(waiting_differences("language", form, m, "exact")) for form in ("int8", "nf4") for m in (1, 4)
    ]
    return max(map(abs, means))


def host_row(name: str) -> dict[str, Any]:
    (found,) = [row for row in result("host_weights")["rows"] if row["name"] == name]
    return dict(found)


def exposed(name: str) -> float:
    """Percent of the step of the fastest streamer."""
    fastest = min(host_row(name)["ideal"].values(), key=lambda each: each["step_seconds"])
    return 100 * float(fastest["exposed_share"])


def lost_by_fsdp2() -> list[float]:
    return [100 * row["fsdp2"]["lost_to_copies"] for row in result("host_weights")["rows"]]


def sft_peak(part: str, kind: str, name: str, phase: str) -> int:
    return int(result("sft")[part][kind][name][phase]["peak_bytes"])


def reselection_seconds(name: str) -> list[float]:
    """What each update of an estimation phase, and the last one's reselection, takes beyond a plain one."""
    times = result("sft")["plain"]["times"]["variants"][name]
    return [seconds - times["plain_seconds"] for seconds in times["seconds"][15:]]


def deviations() -> list[float]:
    return [row["cosine_deviation"] for row in result("token_gradients")["rows"]]


def plan_time_settings(name: str) -> dict[str, Any]:
    (found,) = [row["settings"] for row in result("plan_time")["rows"] if row["name"] == name]
    return dict(found)


def weights_of_plan_time() -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in LlamaForCausalLM(LlamaConfig(**result("plan_time")["model"])).parameters())


def switch_ms(*layouts: str) -> list[float]:
    return sorted(1e3 * result("ranks")["layouts"][each]["hift"]["switch"]["beyond_copies"] for each in layouts)


def environments() -> list[dict[str, Any]]:
    """Environments of the CPU rows in the measured tables of README and docs/hift.md."""
    found = [result(name)["environment"] for name in ("tokentune", "token_gradients", "sft", "ranks")]
    found += [row["environment"] for row in result("quality")["sst2"] if row["name"] in ("dense", "hift-2-x2")]
    found += [result("overhead")[part]["environment"] for part in ("wrapper", "cycle")]
    return found + [run["environment"] for run in result("sst2")["runs"]]


def measured_8b(way: str, card: str, tokens: int = 4096) -> dict[str, Any]:
    """A row of an 8B on a GPU with 24 GiB allowed: of the largest batch that was run."""
    rows = [
        row for row in result("gpu_24gib")["rows"] if (row["way"], row["tokens"], row["card"]) == (way, tokens, card)
    ]
    return dict(max(rows, key=lambda row: int(row["batch"])))


def way_8b(title: str) -> dict[str, Any]:
    """A row of `slivertune plan --compare` for an 8B on a 4090."""
    (found,) = [row for row in result("ways_8b_4090")["rows"] if row["title"] == title]
    return dict(found)


def published(group: str, place: int) -> dict[str, Any]:
    """A row that others have published."""
    (rows,) = [each["rows"] for each in result("plan_speeds")["groups"] if each["name"] == group]
    return dict(rows[place])


def memory_errors(*groups: str) -> list[float]:
    """Absolute errors of planned peaks against measured ones, of these groups or all."""
    found = [each for each in result("plan_memory")["groups"] if not groups or each["name"] in groups]
    return [abs(row["error"]) for each in found for row in each["rows"]]


def sst2_at_rate(m: str, rate: float) -> float:
    runs = result("dial")["sst2"]["runs"]
    return statistics.fmean(
        run["accuracy"] for run in runs if (str(run["layers_per_group"]), run["learning_rate"]) == (m, rate)
    )


def tokentune_saved(name: str) -> int:
    return int(result("tokentune")["variants"][name]["saved_bytes"])


def learned(name: str) -> list[float]:
    """A row's losses on the language reference, one a seed, at its best rate; seeds are three."""
    losses = [run["after"]["eval_loss"] for run in _language_row(name)["runs"]]
    assert len(losses) == 3
    return losses


def seeds_of(task: str, name: str) -> list[float]:
    """A row's losses on the language reference, or its accuracies on another task, one a seed, at its best rate."""
    (row,) = [each for each in result("quality")[task] if each["name"] == name]
    figure = "eval_loss" if task == "language" else "eval_accuracy"
    return [run["after"][figure] for run in row["runs"]]


def is_worse(task: str, name: str, other: str) -> bool:
    """Whether a row differs from another by the pages' rule, and is the worse of both."""
    one, two = seeds_of(task, name), seeds_of(task, other)
    return min(one) > max(two) if task == "language" else max(one) < min(two)


def in_dense_time(first: str, tokens: int, card: str = "4090") -> list[float]:
    """Losses of the best run of a row whose updates fit the planned time of dense's, tokens being those of an 8B.

    Nothing if no run is as short as that.
    """
    way = read_rows_file()["equal_time"][first]["way"]
    allowed = planned_seconds(card, "all", tokens) / planned_seconds(card, way, tokens)
    names = [row["name"] for row in result("quality")["language"]]
    names = [name for name in names if first in (name, name.rpartition("-x")[0])]
    fitting = [name for name in names if times_as_many_updates(name) <= allowed]
    return min(map(learned, fitting), key=statistics.fmean, default=[])


def ways_in_dense_time() -> list[str]:
    """Rows that have a planned time."""
    return list(read_rows_file()["equal_time"])


def rows_of(*beginnings: str) -> list[str]:
    """Rows that have a planned time and whose names begin so."""
    return [each for each in ways_in_dense_time() if each.startswith(beginnings)]


def all_but(*names: str) -> list[str]:
    """Rows that have a planned time, without some."""
    return [each for each in ways_in_dense_time() if each not in names]


def is_least(first: str, tokens: int, others: list[str]) -> bool:
    """Whether a way's losses in dense's time are below those of all others; dense has its own."""
    found = learned("dense") if first == "dense" else in_dense_time(first, tokens)
    rest = [in_dense_time(name, tokens) for name in others] + ([learned("dense")] if first != "dense" else [])
    return all(max(found) < min(each) for each in rest if each)


def differ(first: list[float], second: list[float]) -> bool:
    """Whether the ranges of two rows' seeds do not overlap."""
    return max(first) < min(second) or max(second) < min(first)


def peak_of(task: str, name: str) -> int:
    """Bytes of a row on the device at its peak."""
    (row,) = [each for each in result("quality")[task] if each["name"] == name]
    return max(run["peak_bytes"]["device"] for run in row["runs"])


def loss_before(name: str) -> float:
    """The loss of a row's model on the language reference, before training."""
    (loss,) = {run["before"]["eval_loss"] for run in _language_row(name)["runs"]}
    return float(loss)


def learned_rate(name: str) -> float:
    """The best rate of a row on the language reference."""
    return float(_language_row(name)["runs"][0]["rate"])


def planned_point(card: str, setting: str, tokens: int) -> dict[str, Any]:
    """A planned update of an 8B, as `slivertune plan --json` answers."""
    points: list[dict[str, Any]] = result(RESULT)["points"]
    (found,) = [each for each in points if (each["card"], each["setting"], each["tokens"]) == (card, setting, tokens)]
    return dict(found)


def planned_time(card: str, setting: str, tokens: int) -> dict[str, Any]:
    """Planned time of an update of an 8B."""
    return dict(planned_point(card, setting, tokens)["time"])


def planned_seconds(card: str, setting: str, tokens: int) -> float:
    """Planned seconds of an update of an 8B."""
    return float(planned_time(card, setting, tokens)["seconds_per_update"])


def planned_waiting(card: str, setting: str, tokens: int) -> float:
    """The share of an 8B's update that waits."""
    time = planned_time(card, setting, tokens)
    return float(sum(time["waiting_seconds"].values()) / time["seconds_per_update"])


def pinned_per_second() -> list[float]:
    """GB of host memory that was pinned per second on an H100's machine, run by run."""
    return [result(name)["host_memory"]["pinning_gb_per_second"] for name in ("gpu", "gpu_4096")]


def hours_of_all_rows() -> float:
    """Of updates of the rows that `evidence.py` runs; one that was not run is taken to cost as others do."""
    asked, hours = read_rows_file(), 0.0
    for task, each in asked["tasks"].items():
        if "updates" not in each:
            continue
        there = [row for row in result("quality")[task] if row["runs"]]
        seconds = sum(
            statistics.fmean(run["seconds"] for run in row["runs"]) * (len(row["searched"]) + len(row["runs"]) - 1)
            for row in there
        )
        lengths = sum(times_as_many_updates(row["name"]) for row in there)
        hours += seconds / lengths * sum(map(times_as_many_updates, each.get("rows", asked["rows"]))) / 3600
    return hours


def embedded_config() -> LlamaConfig:
    """Of the embedded base model, as far as its number of weights goes."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=BASE_RECIPE.hidden_size,
        intermediate_size=BASE_RECIPE.intermediate_size,
        num_hidden_layers=BASE_RECIPE.num_layers,
        num_attention_heads=BASE_RECIPE.num_heads,
    )


def lora_share(config: LlamaConfig, rank: int) -> float:
    """Weights of adapters on all linear layers of the blocks, over those of the model."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    linear = [each for each in model.model.layers.modules() if isinstance(each, torch.nn.Linear)]
    return rank * sum(each.in_features + each.out_features for each in linear) / model.num_parameters()


def _language_row(name: str) -> dict[str, Any]:
    return next(row for row in result("quality")["language"] if row["name"] == name)
