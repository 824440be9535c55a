"""The tables of the methods' pages, each from the content of a file under `results/`."""

import statistics
from typing import Any

from markdown_table import markdown_table, mean_and_range, titled
from result_files import GIB, MIB

from slivertune.planning.report import PART_TITLES

LAYOUTS = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
_SFT = {
    "lora": "LoRA r={rank}",
    "sft_ag": "SFT-AG",
    "sft_ma": "SFT-MA",
    "sft_ag_packed": "SFT-AG, packed",
    "dense": "dense AdamW",
}
_TOKENTUNE = {
    "dense": "dense",
    "dense_checkpointing": "dense, layers checkpointed",
    "50%": "50 %",
    "30%": "30 %",
    "20%": "20 %",
    "10%": "10 %",
    "30%_checkpoint_mlp": "30 %, `checkpoint_mlp`",
    "30%_checkpointing": "30 %, layers checkpointed",
}
_PATTERNS = {"random": "`random`", "chunks": "`chunks` of 16", "block": "`block`"}
_METHODS = {"dense": "dense", "hift": "HiFT", "sft_ag": "SFT-AG", "sft_ma": "SFT-MA"}
_TASKS = {"language": "language reference", "sst2": "SST-2"}
Content = dict[str, Any]
Run = dict[str, Any]


def sft(content: Content) -> str:
    """Show time and peak of a step beside LoRA's, without and with checkpointed layers."""
    rows = []
    for part in ("plain", "checkpointing"):
        times = content[part].get("times", {}).get("variants", {})
        for name, title in _SFT.items():
            begins = part == "checkpointing" and name == "lora"
            time, share = "not timed", ""
            if name in times:
                time = f"{times[name]['plain_ratio_to_lora']:.2f}"
                share = f"{100 * times[name]['reselection_share']:.1f} %" if name.startswith("sft") else ""
            title = ("*layers checkpointed:* " if begins else "") + title.format(rank=content["rank"])
            rows.append([title, time, share, _sft_peak(content[part].get("peaks", {}).get(name))])
    heads = ["", "step / LoRA's (CPU time)", "reselection's share", "peak, MiB (in an estimation phase)"]
    return markdown_table(heads, rows)


def sft_in_chunks(content: Content) -> str:
    """Show peaks of a step with the loss in chunks, without and with checkpointed layers."""
    parts = [content[part].get("chunked_peaks", {}) for part in ("plain", "checkpointing")]
    heads = ["8,192 tokens, loss in chunks", "peak, MiB (in an estimation phase)", "layers checkpointed"]
    rows = ([_SFT[name].format(rank=content["rank"]), *(_sft_peak(part[name]) for part in parts)] for name in parts[0])
    return markdown_table(heads, rows)


def _sft_peak(phases: dict[str, Any] | None) -> str:
    if phases is None:
        return "not counted"
    plain, estimating = (f"{phases[phase]['peak_bytes'] / MIB:.0f}" for phase in ("plain", "estimating"))
    return plain if plain == estimating else f"{plain} ({estimating})"


def tokentune(content: Content) -> str:
    """Show time of a step beside the dense one's, and bytes of activations."""
    rows = []
    for name, each in content["variants"].items():
        sizes = (f"{each[kind] / MIB:.0f}" for kind in ("saved_bytes", "peak_activation_bytes"))
        rows.append([_TOKENTUNE[name], f"{each['median_ratio']['cpu']:.2f}", *sizes])
    heads = ["", "step (CPU time)", "saved for the backward, MiB", "most activations at a time, MiB"]
    return markdown_table(heads, rows)


def token_gradients(content: Content) -> str:
    """Show cosines to the dense gradient, by pattern and share of the tokens."""
    cosines = {(row["pattern"], row["ratio"]): row["cosine"] for row in content["rows"]}
    ratios = dict.fromkeys(ratio for _, ratio in cosines)
    rows = ([title, *(f"{cosines[name, ratio]:.2f}" for ratio in ratios)] for name, title in _PATTERNS.items())
    return markdown_table(["", *(f"{100 * ratio:.0f} %" for ratio in ratios)], rows)


def sent_by_ranks(content: Content) -> str:
    """Show megabytes that a rank sends in a step, by layout and method; layouts that send the same share a row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for layout in (each for each in LAYOUTS if each in content["layouts"]):
        methods = content["layouts"][layout]
        sent = (methods.get(method, {}).get("bytes_per_step") for method in _METHODS)
        cells = tuple("" if each is None else f"{each / 1e6:.{1 if each >= 1e6 else 2}f}" for each in sent)
        alike.setdefault(cells, []).append(LAYOUTS[layout])
    return markdown_table(["", *_METHODS.values()], ([", ".join(titles), *row] for row, titles in alike.items()))


def best_runs(part: dict[str, Any], m: str) -> list[Run]:
    """Return the runs of so many layers per group at their best rate, one per seed.

    The best rate has the best mean over all seeds, of those that all seeds ran and none diverged at.
    """
    figure, sign = part["fixed"]["figure"], 1 if part["fixed"]["figure"] == "loss" else -1
    seeds = {run["seed"] for run in part["runs"]}
    by_rate: dict[float, list[Run]] = {}
    for run in sorted(part["runs"], key=lambda each: (each["learning_rate"], each["seed"])):
        if str(run["layers_per_group"]) == m:
            by_rate.setdefault(run["learning_rate"], []).append(run)
    whole = [
        runs
        for runs in by_rate.values()
        if {run["seed"] for run in runs} == seeds and not any(run["diverged"] for run in runs)
    ]
    return min(whole, key=lambda runs: sign * statistics.fmean(run[figure] for run in runs))


def dial(content: Content) -> str:
    """Show losses and accuracies of each `layers_per_group` at equal CPU time, and bytes on the device at the peak."""
    tables = {}
    for task, title in _TASKS.items():
        part, rows = content[task], []
        figure, num_seeds = part["fixed"]["figure"], len({run["seed"] for run in part["runs"]})
        for m, num_groups in content["language"]["calibration"]["num_groups"].items():
            best, num_bytes = best_runs(part, m), part["bytes"][m]["device"]
            cells = [f"{m} (all: dense)" if num_groups == 1 else f"{m} ({num_groups} groups)"]
            cells += [mean_and_range(figure, [run[figure] for run in best]), f"{best[0]['learning_rate']:g}"]
            rows.append([*cells, str(part["calibration"]["num_updates"][m]), f"{num_bytes / 1e6:.1f}"])
        heads = ["`layers_per_group`", figure.capitalize(), "Rate", "Updates", "MB"]
        tables[f"{title}: {figure} ({num_seeds} seeds)"] = markdown_table(heads, rows)
    return titled(tables)


def waiting(content: Content) -> str:
    """Show figures of layers in fewer bits, as they lie on the device, and the mean difference to exact ones."""
    rows = []
    for name, title in _TASKS.items():
        figure = content[name]["figure"]
        for m in dict.fromkeys(run["layers_per_group"] for run in content[name]["runs"]):
            values: dict[str, dict[int, float]] = {"exact": {}, "int8": {}, "nf4": {}}
            for run in content[name]["runs"]:
                if run["layers_per_group"] == m:
                    values[run["form"]][run["seed"]] = run["on_device"][figure]
            cells = []
            for form, of_form in values.items():
                difference = statistics.mean(value - values["exact"][seed] for seed, value in of_form.items())
                beside = f"; {difference:+.4f}" if figure == "loss" else f"; {100 * difference:+.1f}"
                text = mean_and_range(figure, list(of_form.values()), digits=4)
                cells.append(text if form == "exact" else text + beside)
            rows.append([f"{title}, {figure}", str(m), *cells])
    return markdown_table(["Task", "Layers per group", "exact", "`int8`", "`nf4`"], rows)


def plan_time(content: Content) -> str:
    """Show measured and planned seconds of an update on a CPU, but for the dense one, which calibrated it."""
    rows = []
    for row in content["rows"]:
        if row["is_met"] is not None:
            seconds = (sum(row[part].values()) for part in ("measured_seconds", "planned_seconds"))
            rows.append([row["name"], *(f"{each:.3f} s" for each in seconds), f"{100 * row['error']:+.1f} %"])
    return markdown_table(["", "measured", "planned", "error"], rows)


# The ways that a reader decides between, eight at most. TokenTune is beside the same layers without it.
_DRAWN = (
    "HiFT, 1 of 34 layers",
    "HiFT, 9 of 34 layers",
    "HiFT, 9 of 34 layers + TokenTune",
    "full",
    "SFT (AG)",
    "LoRA",
    "QLoRA",
    "dense",
)


def ways(content: Content) -> str:
    """Show what `slivertune plan --compare --json` answered: the fastest way first, those that do not fit last."""
    rows = []
    for row in content["rows"]:
        if "reason" in row:
            rows.append([row["title"], f"can't be planned: {row['reason']}", *[""] * 5])
            continue
        trained = "all weights" if row["trains_all"] else f"{row['num_trainable_peak'] / 1e6:,.0f}M values"
        cells = [row["title"], trained, f"{row['need_bytes'] / GIB:.1f} GiB", f"{row['host_bytes'] / GIB:.0f} GiB"]
        if row["fits"]:
            speeds = (row["time"]["tokens_per_second"], row["weight_tokens_per_second"])
            cells += [str(row["request"]["batch_size"]), *(f"{speed:,.0f}" for speed in speeds)]
        else:
            cells += ["does not fit with 1", "", ""]
        rows.append(cells)
    heads = ["Way", "Trains", "GPU", "Host", "Batch", "Tokens/s", "Tokens/s per trained weight"]
    return markdown_table(heads, rows)


def ways_drawn(content: Content) -> dict[str, Any]:
    """Return the bars of the picture of these ways, the fastest first.

    Returns:
        `title`, `limit_bytes`, and `bars`: by title the bytes at the peak by kind, the bytes of the allowance, and the
        tokens/s (None for a way that does not fit).
    """
    bars = {}
    (length,) = {row["request"]["seq_length"] for row in content["rows"]}
    tokens = f"{length:,} tokens per sequence"
    title = f"{content['model']} on a {content['gpu']}, {tokens}: planned, the largest batch that fits"
    for row in content["rows"]:
        if row["title"] in _DRAWN:
            bars[f"{row['title']}, batch {row['request']['batch_size']}"] = {
                "part_bytes": {kind: row["peak"][f"{kind.removesuffix('s')}_bytes"] for kind in PART_TITLES},
                "allowance_bytes": row["allowance"]["total_bytes"],
                "tokens_per_second": row["time"]["tokens_per_second"] if row["fits"] else None,
            }
    return {"title": title, "limit_bytes": content["fit"]["limit_bytes"], "bars": bars}
