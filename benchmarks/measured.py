"""README's measured figures, read from the files under `results/`: those of its picture, and its table."""

from typing import Any

from dial_table import best_runs
from markdown_table import markdown_table
from result_files import RESULTS, read_json

LAYOUTS = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
MIB = 2**20
GIB = 2**30


def picture() -> dict[str, Any]:
    """What is drawn: shares of dense training, and the dial's losses and megabytes."""
    sft = read_json(RESULTS / "sft.json")["plain"]["times"]["variants"]
    language = read_json(RESULTS / "dial.json")["language"]
    seconds = {
        name: sft[name]["plain_seconds"] / sft["dense"]["plain_seconds"] for name in ("lora", "sft_ma", "sft_ag")
    }
    losses = {m: [run["loss"] for run in best_runs(language, m)] for m in language["bytes"]}
    return {
        "step": {
            "LoRA, rank 64": seconds["lora"],
            "SFT (MA)": seconds["sft_ma"],
            "SFT (AG)": seconds["sft_ag"],
            "HiFT, 1 layer": read_json(RESULTS / "overhead.json")["cycle"]["median_ratio"]["cpu"],
            "TokenTune, 30 %": read_json(RESULTS / "tokentune.json")["variants"]["30%"]["median_ratio"]["cpu"],
        },
        "dial": {
            m: {"loss": sum(each) / len(each), "megabytes": language["bytes"][m]["device"] / 1e6}
            for m, each in losses.items()
        },
        "sent": {
            LAYOUTS[layout]: {name: each[name] for name in ("hift", "sft_ag")} for layout, each in shares_sent().items()
        },
    }


def shares_sent() -> dict[str, dict[str, float]]:
    """Bytes that a rank sends in a step, by layout and method, as a share of dense training's."""
    layouts = read_json(RESULTS / "ranks.json")["layouts"]
    return {
        layout: {
            name: each["bytes_per_step"] / layouts[layout]["dense"]["bytes_per_step"]
            for name, each in layouts[layout].items()
        }
        for layout in LAYOUTS
    }


def table() -> str:
    """Markdown: a row a figure, with what it is held against and the script that measures it."""
    rows = [*_gpu(), *_hift(), *_tokentune(), *_sft(), *_ranks()]
    return markdown_table(["What", "Figure", "Against", "By"], ((*cells, f"`benchmarks/{by}`") for *cells, by in rows))


Cells = tuple[str, str, str, str]


def _hift() -> list[Cells]:
    overhead, sst2 = read_json(RESULTS / "overhead.json"), read_json(RESULTS / "sst2.json")
    cycle, wrapper = overhead["cycle"], overhead["wrapper"]
    dense, hift = sst2["summary"]["dense"], sst2["summary"]["hift"]
    one_layer = [run for run in sst2["runs"] if run["layers_per_group"] == 1]
    best = max(one_layer, key=lambda run: run["dev_accuracy"])
    seeds = len(sst2["summary"]["seeds"])
    error = sst2["summary"]["dense_minus_hift_standard_error_points"]
    bits = "the same bits" if wrapper["same_weights_as_bare"]["wrapped"] else "other bits"
    rates = ", ".join(f"{run['learning_rate']:g}" for run in one_layer)
    return [
        (
            f"HiFT, a step, mean over a cycle; Llama of {cycle['sizes']['blocks']} blocks",
            f"{cycle['median_ratio']['cpu']:.3f} of the CPU time",
            "the dense step",
            "overhead.py",
        ),
        (
            f"HiFT with one group (k=1), a step; {wrapper['num_parameters'] / 1e6:.0f}M parameters",
            f"{wrapper['median_ratio_to_bare']['wrapped']['cpu']:.3f} of the CPU time, {bits}",
            "the bare AdamW",
            "overhead.py",
        ),
        (
            (
                f"HiFT, SST-2 with a pretrained MiniLM, {hift['num_steps']} steps to dense's {dense['num_steps']}, "
                f"`layers_per_group={_layers(hift['setting'])}`"
            ),
            f"{_percent(hift['dev_accuracy'])} ({seeds} seed{'s' * (seeds > 1)}, ± {error:.1f} points)",
            f"dense {_percent(dense['dev_accuracy'])}",
            "sst2.py",
        ),
        (
            f"the same, `layers_per_group=1` (rates tried: {rates})",
            _percent(best["dev_accuracy"]),
            f"dense {_percent(dense['dev_accuracy'])}",
            "sst2.py",
        ),
    ]


def _layers(setting: str) -> str:
    """Of a setting such as `hift m=2 bottom2up lr=0.0001`."""
    return next(word.removeprefix("m=") for word in setting.split() if word.startswith("m="))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _gpu() -> list[Cells]:
    rows: list[Cells] = []
    for name in ("gpu", "gpu_4096"):
        run = read_json(RESULTS / f"{name}.json")
        sizes, summary = run["sizes"], run["summary"]
        # Until the last step of the first cycle nothing is prefetched.
        peak = max(step["peak_bytes"] for step in run["cycles"][0][:-1])
        label = f"HiFT, Llama-2-7B in full, {sizes['batch_size']} x {sizes['length']:,} tokens, {run['device']}"
        share = run["planned"]["peak_bytes"] / peak - 1
        rows += [
            (f"{label}: peak before prefetch", f"{peak / GIB:.2f} GiB", f"planned: {100 * share:+.1f} %", "gpu.py"),
            (
                "the same, a step, mean over a cycle",
                f"{summary['mean_ms']:.0f} ms, {summary['mean_waits_ms']:.1f} ms of it waiting for copies",
                f"dense forward and backward alone: {run['dense']['median_ms']:.0f} ms",
                "gpu.py",
            ),
        ]
    ways = {
        (row["way"], row["tokens"], row["batch"], row["card"]): row
        for row in read_json(RESULTS / "gpu_24gib.json")["rows"]
    }
    card = "NVIDIA H200"
    speeds = [ways[way, 4096, 2, card]["tokens_per_second"] for way in ("m1", "m8", "lora", "qlora")]
    hift, eight, lora, qlora = (f"{speed:,.0f}" for speed in speeds)
    return [
        *rows,
        (
            f"HiFT, Llama-3.1-8B in full, 2 x 2,048 tokens, {card}, 24 GiB allowed: 1 layer (8 layers) per group",
            f"{hift} ({eight}) tokens/s",
            f"LoRA, rank 64: {lora}; QLoRA: {qlora} tokens/s",
            "curve_measured.py",
        ),
    ]


def _tokentune() -> list[Cells]:
    measured = read_json(RESULTS / "tokentune.json")
    sizes, part, dense = measured["sizes"], measured["variants"]["30%"], measured["variants"]["dense"]
    cosines = {
        row["pattern"]: row["cosine"]
        for row in read_json(RESULTS / "token_gradients.json")["rows"]
        if row["ratio"] == part["ratio"]
    }
    return [
        (
            (
                f"TokenTune at {100 * part['ratio']:.0f} %, forward and backward; "
                f"{sizes['batch_size']} x {sizes['length']:,} tokens"
            ),
            f"{part['median_ratio']['cpu']:.3f} of the CPU time",
            "the dense step",
            "tokentune.py",
        ),
        (
            "its saved activations",
            f"{part['saved_bytes'] / MIB:.0f} MiB, {part['saved_bytes_to_floor']:.3f} of the least possible",
            f"dense {dense['saved_bytes'] / MIB:.0f} MiB",
            "tokentune.py",
        ),
        (
            "the cosine of its gradient; chunks of 16, token by token",
            f"{cosines['chunks']:.2f}, {cosines['random']:.2f}",
            "the dense gradient",
            "token_gradients.py",
        ),
    ]


def _sft() -> list[Cells]:
    measured = read_json(RESULTS / "sft.json")
    times, sizes = measured["plain"]["times"]["variants"], measured["sizes"]
    ag, ma = times["sft_ag"], times["sft_ma"]
    processor = measured["environment"]["processor"].replace("(R)", "").removesuffix(" Processor")
    peaks = {
        f"its bytes at the peak, {sizes['batch_size']} x {sizes['length']} tokens; AG (estimating), MA": (
            "plain",
            "peaks",
        ),
        "the same, 8,192 tokens, the loss in chunks": ("plain", "chunked_peaks"),
        "the same, layers checkpointed as well": ("checkpointing", "chunked_peaks"),
    }
    return [
        (
            "SFT, a step, bf16; AG, MA",
            f"{ag['plain_ratio_to_lora']:.2f}, {ma['plain_ratio_to_lora']:.2f} of the CPU time",
            f"LoRA of as many weights (rank {measured['rank']}), on an {processor}",
            "sft.py",
        ),
        (
            "its reselections, of an interval of 20 updates; AG, MA",
            f"{100 * ag['reselection_share']:.1f}, {100 * ma['reselection_share']:.1f} % of the CPU time",
            "updates without them",
            "sft.py",
        ),
        *((what, *_peaks(measured[part][kind]), "sft.py") for what, (part, kind) in peaks.items()),
    ]


def _peaks(measured: dict[str, Any]) -> tuple[str, str]:
    ag, estimating, ma, lora = (
        f"{measured[name][phase]['peak_bytes'] / MIB:.0f}"
        for name, phase in (("sft_ag", "plain"), ("sft_ag", "estimating"), ("sft_ma", "plain"), ("lora", "plain"))
    )
    return f"{ag} ({estimating}), {ma} MiB", f"LoRA {lora} MiB"


def _ranks() -> list[Cells]:
    measured, sent = read_json(RESULTS / "ranks.json")["layouts"], shares_sent()
    switches = {layout: f"{1e3 * measured[layout]['hift']['switch']['beyond_copies']:.2f} ms" for layout in LAYOUTS}
    shares = {name: {layout: f"{sent[layout][name]:.3f}" for layout in LAYOUTS} for name in ("hift", "sft_ag")}
    against = "dense under the same layout"
    return [
        ("HiFT, bytes a rank sends in a step", _by_layout(shares["hift"]), against, "ranks.py"),
        ("SFT (AG), density 0.01, the same", _by_layout(shares["sft_ag"]), against, "ranks.py"),
        ("HiFT's change of groups, beyond the copies of state", _by_layout(switches), "", "ranks.py"),
    ]


def _by_layout(figures: dict[str, str]) -> str:
    """A figure with its layouts, those of the same figure together."""
    return "; ".join(
        f"{', '.join(LAYOUTS[layout] for layout in figures if figures[layout] == each)}: {each}"
        for each in dict.fromkeys(figures.values())
    )
