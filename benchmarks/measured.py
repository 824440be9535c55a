"""README's table of measured figures, and those of docs/hift.md, from the files under `results/`."""

from typing import Any

from evidence_rows import times_as_many_updates
from evidence_tables import read_results
from markdown_table import markdown_table
from method_tables import LAYOUTS
from result_files import GIB, kept

Cells = tuple[str, str, str, str]
_HEADS = ["Measurement", "Result", "Compared with", "In `benchmarks/`"]


def table() -> str:
    """Make README's rows: a figure, what it is compared with, and what measured it."""
    rows = [*_gpu("gpu_4096"), *_speeds(), _sst2(), *_tokentune(), *_sft(), _ranks()]
    return _table(rows)


def hift_table() -> str:
    """Make the rows of docs/hift.md that README has no room for."""
    return _table([*_gpu("gpu"), *_overhead(), *_sst2_of_one_seed()])


def _table(rows: list[Cells]) -> str:
    return markdown_table(_HEADS, ((*cells, f"`{by}`") for *cells, by in rows))


def _gpu(name: str) -> list[Cells]:
    run = kept(name)
    sizes, summary = run["sizes"], run["summary"]
    # Until the last step of the first cycle nothing is prefetched.
    peak = max(step["peak_bytes"] for step in run["cycles"][0][:-1])
    card = run["device"].split()[1]
    label = f"HiFT (1 layer per group), Llama-2-7B, {sizes['batch_size']} x {sizes['length']:,} tokens, {card}"
    step = f"{summary['mean_ms']:.0f} ms, {summary['mean_waits_ms']:.1f} ms of it a stall for copies"
    dense = f"dense forward and backward alone: {run['dense']['median_ms']:.0f} ms"
    planned = f"planned: {run['planned']['peak_bytes'] / GIB:.2f} GiB"
    return [
        (f"{label}: peak memory without prefetch", f"{peak / GIB:.2f} GiB", planned, "gpu.py"),
        ("Same run: time per step, mean over a cycle", step, dense, "gpu.py"),
    ]


_SPEEDS_CARD = "NVIDIA H200"
_SPEEDS_OF = {
    "m1": "HiFT, 1 layer per group",
    "m8": "HiFT, 8 layers per group",
    "sft": "SFT (AG), as many weights as LoRA of rank 64",
    "lora": "LoRA, rank 64",
    "qlora": "QLoRA, rank 64",
    "torchao": "torchao's offloaded AdamW, all layers, bf16 without master weights",
}
_SPEEDS_TOKENS = (512, 4096, 32768)


def speeds_table() -> str:
    """Make the table of tokens/s of an 8B on one card with 24 GiB allowed, by tokens per update."""
    heads = ["Way", *(f"{tokens:,} tokens per update" for tokens in _SPEEDS_TOKENS)]
    rows = ([title, *(_speed_cell(way, tokens) for tokens in _SPEEDS_TOKENS)] for way, title in _SPEEDS_OF.items())
    return markdown_table(heads, rows)


def _speed_cell(way: str, tokens: int) -> str:
    """Show the tokens/s of a way's fastest trial; nothing if it has none."""
    found = [
        row["tokens_per_second"]
        for row in kept("gpu_24gib")["rows"]
        if row["fits"] and (row["way"], row["tokens"], row["card"]) == (way, tokens, _SPEEDS_CARD)
    ]
    return f"{max(found):,.0f}" if found else ""


def _speeds() -> list[Cells]:
    """Make a row for each number of tokens per update. A way that was not run with as many is left out."""
    rows, others = [], {"m8": "8 layers", "lora": "LoRA, rank 64", "torchao": "torchao's AdamW"}
    for tokens in (4096, 32768):
        label = "HiFT (1 layer per group), Llama-3.1-8B, H200, 24 GiB allowed" if not rows else "Same card and model"
        beside = {title: _speed_cell(way, tokens) for way, title in others.items()}
        compared = "; ".join(f"{title}: {speed}" for title, speed in beside.items() if speed)
        what = f"{label}, {tokens:,} tokens per update"
        rows.append((what, f"{_speed_cell('m1', tokens)} tokens/s", compared, "curve_measured.py"))
    return rows


_FEATURES = {
    "device": 'State on the device (`state="device"`)',
    "host": "State on the host (default)",
    "prefetch off": "`prefetch_bytes=0`",
    "disk": '`state="disk"`',
    "gradients host": '`gradients="host"`',
    "gradients stepped": '`gradients="stepped"`',
    "weights host, none resident": '`weights="host"`, `resident_bytes=0`',
    "waiting int8": '`waiting="int8"`',
    "weights host, nf4": '`weights="host"`, `waiting="nf4"`',
    "activations offloaded": "`offload_activations`",
    "compiled blocks": "`compile_blocks`",
    "bitsandbytes' AdamW8bit": "bitsandbytes' `AdamW8bit`",
    "torchao's AdamW8bit": "torchao's `AdamW8bit`",
    "SGD": "`SGD`",
}
"""Titles of the rows of `results/gpu_features.json` in docs/hift.md."""


def features_table() -> str:
    """Make the table of HiFT's memory features, each run once on a card."""
    bits = {True: "same", False: "others", None: ""}
    rows = kept("gpu_features")["rows"]
    return markdown_table(
        ["HiFT with", "Time per update, ms", "Peak memory, GiB", "Bits of the first row"],
        (
            [title, f"{row['milliseconds']:,.0f}", f"{row['peak_bytes'] / GIB:.1f}", bits[row.get("same_bits")]]
            for row, title in ((rows[name], title) for name, title in _FEATURES.items())
        ),
    )


def _overhead() -> list[Cells]:
    cycle, wrapper = kept("overhead")["cycle"], kept("overhead")["wrapper"]
    bits = "same" if wrapper["same_weights_as_bare"]["wrapped"] else "other"
    return [
        (
            f"HiFT, Llama of {cycle['sizes']['blocks']} blocks, 1 layer per group: step, mean over a cycle",
            f"{cycle['median_ratio']['cpu']:.3f} of the CPU time",
            "dense step",
            "overhead.py",
        ),
        (
            f"HiFT, {wrapper['num_parameters'] / 1e6:.0f} million parameters, all layers in one group: step",
            f"{wrapper['median_ratio_to_bare']['wrapped']['cpu']:.3f} of the CPU time, {bits} bits",
            "AdamW alone",
            "overhead.py",
        ),
    ]


def _sst2() -> Cells:
    of_task, name = read_results()["sst2"], "hift-2-x2"
    dense, seeds = of_task["dense"], len(of_task[name].values)
    updates = f"{times_as_many_updates(name):g} times the updates of dense"
    what = f"HiFT, MiniLM on SST-2, 2 layers per group, {updates}: accuracy, {seeds} seeds"
    return what, str(of_task[name]), f"dense: {dense}", "evidence.py"


def _sst2_of_one_seed() -> list[Cells]:
    content = kept("sst2")
    (seed,), dense, rows = content["summary"]["seeds"], content["summary"]["dense"], []
    for layers_per_group in (2, 1):
        runs = [run for run in content["runs"] if run["layers_per_group"] == layers_per_group]
        best = max(runs, key=lambda run: float(run["dev_accuracy"]))
        layers = f"{layers_per_group} layer{'s' * (layers_per_group > 1)} per group"
        what = f"HiFT, MiniLM on SST-2, {layers}, {best['num_steps']} updates, seed {seed}: accuracy"
        rates = f"rates {', '.join(f'{rate:g}' for rate in sorted(run['learning_rate'] for run in runs))}"
        beside = f"dense, {dense['num_steps']} updates: {_percent(dense)}"
        rows.append((what, f"{_percent(best)} ({rates})", beside, "results/sst2.json"))
    return rows


def _percent(run: dict[str, Any]) -> str:
    return f"{100 * run['dev_accuracy']:.1f} %"


def _tokentune() -> list[Cells]:
    content = kept("tokentune")
    sizes, part = content["sizes"], content["variants"]["30%"]
    cosines = {
        row["pattern"]: f"{row['cosine']:.2f}"
        for row in kept("token_gradients")["rows"]
        if row["ratio"] == part["ratio"]
    }
    label = f"TokenTune at {100 * part['ratio']:.0f} %"
    return [
        (
            f"{label}, {sizes['batch_size']} x {sizes['length']:,} tokens: forward and backward",
            f"{part['median_ratio']['cpu']:.3f} of the CPU time",
            "dense",
            "tokentune.py",
        ),
        *(
            (
                f"{label}, {drawn}: cosine of its gradient",
                cosines[name],
                "dense gradient",
                "results/token_gradients.json",
            )
            for name, drawn in (("chunks", "chunks of 16 tokens"), ("random", "single tokens"))
        ),
    ]


def _sft() -> list[Cells]:
    content = kept("sft")
    times = content["plain"]["times"]["variants"]
    processor = content["environment"]["processor"].replace("(R)", "").removesuffix(" Processor")
    lora = f"LoRA of as many weights (rank {content['rank']}), {processor}"
    return [
        (f"SFT by {by}, bf16: step", f"{times[name]['plain_ratio_to_lora']:.2f} of the CPU time", lora, "sft.py")
        for name, by in (("sft_ag", "gradients"), ("sft_ma", "momentum"))
    ]


def _ranks() -> Cells:
    alike: dict[str, list[str]] = {}
    for layout, title in LAYOUTS.items():
        methods = kept("ranks")["layouts"][layout]
        share = methods["hift"]["bytes_per_step"] / methods["dense"]["bytes_per_step"]
        alike.setdefault(f"{share:.3f}", []).append(title)
    shares = "; ".join(f"{', '.join(titles)}: {share}" for share, titles in alike.items())
    what = "HiFT (1 layer per group), several ranks: bytes sent per rank and step"
    return what, shares, "share of dense", "ranks.py"
