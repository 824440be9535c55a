"""The tables of the methods' pages, from the files under `results/`."""

import statistics
from typing import Any

from markdown_table import markdown_table, mean_and_range
from result_files import GIB, MIB, kept

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
Run = dict[str, Any]


def sft() -> str:
    """Time and peak of a step beside LoRA's, without and with checkpointed layers."""
    content = kept("sft")
    rows = []
    for part in ("plain", "checkpointing"):
        times = content[part]["times"]["variants"]
        for name, title in _SFT.items():
            begins = part == "checkpointing" and name == "lora"
            time, share = "not timed", ""
            if name in times:
                time = f"{times[name]['plain_ratio_to_lora']:.2f}"
                share = f"{100 * times[name]['reselection_share']:.1f} %" if name.startswith("sft") else ""
            title = ("*layers checkpointed:* " if begins else "") + title.format(rank=content["rank"])
            rows.append([title, time, share, _sft_peak(content[part]["peaks"][name])])
    heads = ["", "step / LoRA's (CPU time)", "reselection's share", "peak, MiB (in an estimation phase)"]
    return markdown_table(heads, rows)


def sft_in_chunks() -> str:
    """Peaks of a step with the loss in chunks, without and with checkpointed layers."""
    content = kept("sft")
    parts = [content[part]["chunked_peaks"] for part in ("plain", "checkpointing")]
    heads = ["8,192 tokens, loss in chunks", "peak, MiB (in an estimation phase)", "layers checkpointed"]
    rows = ([_SFT[name].format(rank=content["rank"]), *(_sft_peak(part[name]) for part in parts)] for name in parts[0])
    return markdown_table(heads, rows)


def _sft_peak(phases: dict[str, Any]) -> str:
    plain, estimating = (f"{phases[phase]['peak_bytes'] / MIB:.0f}" for phase in ("plain", "estimating"))
    return plain if plain == estimating else f"{plain} ({estimating})"


def tokentune() -> str:
    """Time of a step beside the dense one's, and bytes of activations."""
    rows = []
    for name, each in kept("tokentune")["variants"].items():
        sizes = (f"{each[kind] / MIB:.0f}" for kind in ("saved_bytes", "peak_activation_bytes"))
        rows.append([_TOKENTUNE[name], f"{each['median_ratio']['cpu']:.2f}", *sizes])
    heads = ["", "step (CPU time)", "saved for the backward, MiB", "most activations at a time, MiB"]
    return markdown_table(heads, rows)


def token_gradients() -> str:
    """Cosines to the dense gradient, by pattern and share of the tokens."""
    cosines = {(row["pattern"], row["ratio"]): row["cosine"] for row in kept("token_gradients")["rows"]}
    ratios = dict.fromkeys(ratio for _, ratio in cosines)
    rows = ([title, *(f"{cosines[name, ratio]:.2f}" for ratio in ratios)] for name, title in _PATTERNS.items())
    return markdown_table(["", *(f"{100 * ratio:.0f} %" for ratio in ratios)], rows)


def sent_by_ranks() -> str:
    """Megabytes that a rank sends in a step, by layout and method; layouts that send the same in one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for layout, title in LAYOUTS.items():
        sent = [kept("ranks")["layouts"][layout][method]["bytes_per_step"] / 1e6 for method in _METHODS]
        alike.setdefault(tuple(f"{each:.{1 if each >= 1 else 2}f}" for each in sent), []).append(title)
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


def dial() -> str:
    """Losses and accuracies of each `layers_per_group` at equal CPU time, and bytes on the device at the peak."""
    content = kept("dial")
    heads, rows = ["`layers_per_group`"], []
    for name, part in content.items():
        if name in _TASKS:
            num_seeds = len({run["seed"] for run in part["runs"]})
            heads += [f"{_TASKS[name]}: {part['fixed']['figure']} ({num_seeds} seeds)", "rate", "updates", "MB"]
    for m, num_groups in content["language"]["calibration"]["num_groups"].items():
        cells = [f"{m} (all: dense)" if num_groups == 1 else f"{m} ({num_groups} groups)"]
        for part in (content[name] for name in _TASKS):
            best, figure = best_runs(part, m), part["fixed"]["figure"]
            updates, num_bytes = part["calibration"]["num_updates"][m], part["bytes"][m]["device"]
            cells += [mean_and_range(figure, [run[figure] for run in best]), f"{best[0]['learning_rate']:g}"]
            cells += [str(updates), f"{num_bytes / 1e6:.1f}"]
        rows.append(cells)
    return markdown_table(heads, rows)


def waiting() -> str:
    """Figures of layers in fewer bits, as they lie on the device, and the mean difference to exact ones by seed."""
    content, rows = kept("waiting"), []
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
    return markdown_table(["Task", "Layers a group", "exact", "`int8`", "`nf4`"], rows)


def plan_time() -> str:
    """Measured and planned seconds of an update on a CPU, but for the dense one, which calibrated it."""
    rows = []
    for row in kept("plan_time")["rows"]:
        if row["is_met"] is not None:
            seconds = (sum(row[part].values()) for part in ("measured_seconds", "planned_seconds"))
            rows.append([row["name"], *(f"{each:.3f} s" for each in seconds), f"{100 * row['error']:+.1f} %"])
    return markdown_table(["", "measured", "planned", "error"], rows)


def ways() -> str:
    """What `slivertune plan --compare --json` answered: the fastest way first, those that do not fit last."""
    rows = []
    for row in kept("ways_8b_4090")["rows"]:
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
    heads = ["Way", "Trains", "GPU", "Host", "Batch", "Tokens a second", "On which a weight trains"]
    return markdown_table(heads, rows)
