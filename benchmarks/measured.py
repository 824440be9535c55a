"""README's measured figures, from the files under `results/`: its table, and what its picture shows."""

from typing import Any

from markdown_table import markdown_table
from method_tables import LAYOUTS, best_runs
from result_files import GIB, MIB, kept

Cells = tuple[str, str, str, str]


def table() -> str:
    """Make a row per figure, with what it is held against and what measured it."""
    rows = [*_gpu(), *_hift(), *_tokentune(), *_sft(), *_ranks()]
    return markdown_table(["What", "Figure", "Against", "By"], ((*cells, f"`benchmarks/{by}`") for *cells, by in rows))


def picture() -> dict[str, Any]:
    """Return what is drawn: shares of dense training, and the losses and megabytes of each `layers_per_group`."""
    sft, language = kept("sft")["plain"]["times"]["variants"], kept("dial")["language"]
    lora, ma, ag = (sft[name]["plain_seconds"] / sft["dense"]["plain_seconds"] for name in ("lora", "sft_ma", "sft_ag"))
    losses = {m: [run["loss"] for run in best_runs(language, m)] for m in language["bytes"]}
    return {
        "step": {
            "LoRA, rank 64": lora,
            "SFT (MA)": ma,
            "SFT (AG)": ag,
            "HiFT, 1 layer": kept("overhead")["cycle"]["median_ratio"]["cpu"],
            "TokenTune, 30 %": kept("tokentune")["variants"]["30%"]["median_ratio"]["cpu"],
        },
        "dial": {
            m: {"loss": sum(each) / len(each), "megabytes": language["bytes"][m]["device"] / 1e6}
            for m, each in losses.items()
        },
        "sent": {title: _shares_sent(layout) for layout, title in LAYOUTS.items()},
    }


def _shares_sent(layout: str) -> dict[str, float]:
    """Bytes that a rank sends in a step, as a share of dense training's."""
    sent = {name: each["bytes_per_step"] for name, each in kept("ranks")["layouts"][layout].items()}
    return {name: sent[name] / sent["dense"] for name in ("hift", "sft_ag")}


def _gpu() -> list[Cells]:
    rows: list[Cells] = []
    for run in (kept("gpu"), kept("gpu_4096")):
        sizes, summary = run["sizes"], run["summary"]
        # Until the last step of the first cycle nothing is prefetched.
        peak = max(step["peak_bytes"] for step in run["cycles"][0][:-1])
        label = f"HiFT, Llama-2-7B in full, {sizes['batch_size']} x {sizes['length']:,} tokens, {run['device']}"
        planned = f"planned: {100 * (run['planned']['peak_bytes'] / peak - 1):+.1f} %"
        step = f"{summary['mean_ms']:.0f} ms, {summary['mean_waits_ms']:.1f} ms of it waiting for copies"
        dense = f"dense forward and backward alone: {run['dense']['median_ms']:.0f} ms"
        rows.append((f"{label}: peak before prefetch", f"{peak / GIB:.2f} GiB", planned, "gpu.py"))
        rows.append(("the same, a step, mean over a cycle", step, dense, "gpu.py"))
    card = "NVIDIA H200"
    speeds = {
        row["way"]: f"{row['tokens_per_second']:,.0f}"
        for row in kept("gpu_24gib")["rows"]
        if row["fits"] and (row["tokens"], row["batch"], row["card"]) == (4096, 2, card)
    }
    what = f"HiFT, Llama-3.1-8B in full, 2 x 2,048 tokens, {card}, 24 GiB allowed: 1 layer (8 layers) per group"
    others = f"LoRA, rank 64: {speeds['lora']}; QLoRA: {speeds['qlora']} tokens/s"
    return [*rows, (what, f"{speeds['m1']} ({speeds['m8']}) tokens/s", others, "curve_measured.py")]


def _hift() -> list[Cells]:
    cycle, wrapper, sst2 = kept("overhead")["cycle"], kept("overhead")["wrapper"], kept("sst2")
    bits = "the same bits" if wrapper["same_weights_as_bare"]["wrapped"] else "other bits"
    k1 = f"{wrapper['median_ratio_to_bare']['wrapped']['cpu']:.3f} of the CPU time, {bits}"
    dense, hift, seeds = (sst2["summary"][name] for name in ("dense", "hift", "seeds"))
    m = next(word for word in hift["setting"].split() if word.startswith("m=")).removeprefix("m=")
    error = sst2["summary"]["dense_minus_hift_standard_error_points"]
    updates = f"{hift['num_steps']} steps to dense's {dense['num_steps']}"
    accuracy = f"{_percent(hift)} ({len(seeds)} seed{'s' * (len(seeds) > 1)}, ± {error:.1f} points)"
    one_layer = [run for run in sst2["runs"] if run["layers_per_group"] == 1]
    best = max(one_layer, key=lambda run: float(run["dev_accuracy"]))
    tried = ", ".join(f"{run['learning_rate']:g}" for run in one_layer)
    sst2_of = "HiFT, SST-2 with a pretrained MiniLM"
    return [
        (
            f"HiFT, a step, mean over a cycle; Llama of {cycle['sizes']['blocks']} blocks",
            f"{cycle['median_ratio']['cpu']:.3f} of the CPU time",
            "the dense step",
            "overhead.py",
        ),
        (
            f"HiFT with one group (k=1), a step; {wrapper['num_parameters'] / 1e6:.0f}M parameters",
            k1,
            "the bare AdamW",
            "overhead.py",
        ),
        (f"{sst2_of}, {updates}, `layers_per_group={m}`", accuracy, f"dense {_percent(dense)}", "results/sst2.json"),
        (
            f"the same, `layers_per_group=1` (rates tried: {tried})",
            _percent(best),
            f"dense {_percent(dense)}",
            "results/sst2.json",
        ),
    ]


def _percent(run: dict[str, Any]) -> str:
    return f"{100 * run['dev_accuracy']:.1f} %"


def _tokentune() -> list[Cells]:
    content = kept("tokentune")
    sizes, part, dense = content["sizes"], content["variants"]["30%"], content["variants"]["dense"]
    cosines = {
        row["pattern"]: f"{row['cosine']:.2f}"
        for row in kept("token_gradients")["rows"]
        if row["ratio"] == part["ratio"]
    }
    batch = f"{sizes['batch_size']} x {sizes['length']:,} tokens"
    saved = f"{part['saved_bytes'] / MIB:.0f} MiB, {part['saved_bytes_to_floor']:.3f} of the least possible"
    return [
        (
            f"TokenTune at {100 * part['ratio']:.0f} %, forward and backward; {batch}",
            f"{part['median_ratio']['cpu']:.3f} of the CPU time",
            "the dense step",
            "tokentune.py",
        ),
        ("its saved activations", saved, f"dense {dense['saved_bytes'] / MIB:.0f} MiB", "tokentune.py"),
        (
            "the cosine of its gradient; chunks of 16, token by token",
            f"{cosines['chunks']}, {cosines['random']}",
            "the dense gradient",
            "results/token_gradients.json",
        ),
    ]


def _sft() -> list[Cells]:
    content = kept("sft")
    times, sizes = content["plain"]["times"]["variants"], content["sizes"]
    ag, ma = times["sft_ag"], times["sft_ma"]
    processor = content["environment"]["processor"].replace("(R)", "").removesuffix(" Processor")
    batch = f"{sizes['batch_size']} x {sizes['length']} tokens"
    return [
        (
            "SFT, a step, bf16; AG, MA",
            f"{ag['plain_ratio_to_lora']:.2f}, {ma['plain_ratio_to_lora']:.2f} of the CPU time",
            f"LoRA of as many weights (rank {content['rank']}), on an {processor}",
            "sft.py",
        ),
        (
            "its reselections, of an interval of 20 updates; AG, MA",
            f"{100 * ag['reselection_share']:.1f}, {100 * ma['reselection_share']:.1f} % of the CPU time",
            "updates without them",
            "sft.py",
        ),
        _peaks(f"its bytes at the peak, {batch}; AG (estimating), MA", content["plain"]["peaks"]),
        _peaks("the same, 8,192 tokens, the loss in chunks", content["plain"]["chunked_peaks"]),
        _peaks("the same, layers checkpointed as well", content["checkpointing"]["chunked_peaks"]),
    ]


def _peaks(what: str, peaks: dict[str, Any]) -> Cells:
    shown = (("sft_ag", "plain"), ("sft_ag", "estimating"), ("sft_ma", "plain"), ("lora", "plain"))
    ag, estimating, ma, lora = (f"{peaks[name][phase]['peak_bytes'] / MIB:.0f}" for name, phase in shown)
    return what, f"{ag} ({estimating}), {ma} MiB", f"LoRA {lora} MiB", "sft.py"


def _ranks() -> list[Cells]:
    layouts = kept("ranks")["layouts"]
    hift, sft = ({layout: f"{_shares_sent(layout)[name]:.3f}" for layout in LAYOUTS} for name in ("hift", "sft_ag"))
    switches = {layout: f"{1e3 * layouts[layout]['hift']['switch']['beyond_copies']:.2f} ms" for layout in LAYOUTS}
    against = "dense under the same layout"
    return [
        ("HiFT, bytes that each rank sends per step", _by_layout(hift), against, "ranks.py"),
        ("SFT (AG), density 0.01, the same", _by_layout(sft), against, "ranks.py"),
        ("HiFT's change of groups, beyond the copies of state", _by_layout(switches), "", "ranks.py"),
    ]


def _by_layout(figures: dict[str, str]) -> str:
    """Write a figure with its layouts, those of the same figure together."""
    alike: dict[str, list[str]] = {}
    for layout, figure in figures.items():
        alike.setdefault(figure, []).append(LAYOUTS[layout])
    return "; ".join(f"{', '.join(titles)}: {figure}" for figure, titles in alike.items())
