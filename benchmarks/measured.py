"""README's table of measured figures, and that of docs/hift.md, from the files under `results/`."""

from typing import Any

from evidence_rows import times_as_many_updates
from evidence_tables import read_results
from markdown_table import markdown_table
from method_tables import LAYOUTS
from result_files import GIB, kept

Cells = tuple[str, str, str, str]
_HEADS = ["Measurement", "Result", "Compared with", "Script or file"]


def table() -> str:
    """Make README's rows: a figure, what it is compared with, and what measured it."""
    rows = [*_gpu("gpu_4096"), _speeds(), _sst2(), *_tokentune(), _sft(), _ranks()]
    return _table(rows)


def hift_table() -> str:
    """Make the rows of docs/hift.md that README has no room for."""
    return _table([*_gpu("gpu"), *_overhead(), *_sst2_of_one_seed()])


def _table(rows: list[Cells]) -> str:
    return markdown_table(_HEADS, ((*cells, f"`benchmarks/{by}`") for *cells, by in rows))


def _gpu(name: str) -> list[Cells]:
    run = kept(name)
    sizes, summary = run["sizes"], run["summary"]
    # Until the last step of the first cycle nothing is prefetched.
    peak = max(step["peak_bytes"] for step in run["cycles"][0][:-1])
    card = run["device"].split()[1]
    label = f"HiFT, Llama-2-7B, {sizes['batch_size']} x {sizes['length']:,} tokens, {card}"
    step = f"{summary['mean_ms']:.0f} ms, {summary['mean_waits_ms']:.1f} ms of it a stall for copies"
    dense = f"dense forward and backward alone: {run['dense']['median_ms']:.0f} ms"
    planned = f"planned: {run['planned']['peak_bytes'] / GIB:.2f} GiB"
    return [
        (f"{label}: peak memory without prefetch", f"{peak / GIB:.2f} GiB", planned, "gpu.py"),
        ("Same run: time per step, mean over a cycle", step, dense, "gpu.py"),
    ]


def _speeds() -> Cells:
    card = "NVIDIA H200"
    speeds = {
        row["way"]: f"{row['tokens_per_second']:,.0f}"
        for row in kept("gpu_24gib")["rows"]
        if row["fits"] and (row["tokens"], row["batch"], row["card"]) == (4096, 2, card)
    }
    return (
        "HiFT, Llama-3.1-8B, 2 x 2,048 tokens, H200, 24 GiB allowed: speed with 1 (8) layers per group",
        f"{speeds['m1']} ({speeds['m8']}) tokens/s",
        f"LoRA, rank 64: {speeds['lora']}; QLoRA: {speeds['qlora']} tokens/s",
        "curve_measured.py",
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
        rates = f"rates tried: {', '.join(f'{rate:g}' for rate in sorted(run['learning_rate'] for run in runs))}"
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
        (
            f"{label}: cosine of its gradient, chunks of 16 (single tokens)",
            f"{cosines['chunks']} ({cosines['random']})",
            "dense gradient",
            "results/token_gradients.json",
        ),
    ]


def _sft() -> Cells:
    content = kept("sft")
    times = content["plain"]["times"]["variants"]
    ag, ma = (f"{times[name]['plain_ratio_to_lora']:.2f}" for name in ("sft_ag", "sft_ma"))
    processor = content["environment"]["processor"].replace("(R)", "").removesuffix(" Processor")
    lora = f"LoRA of as many weights (rank {content['rank']}), {processor}"
    return "SFT, bf16, AG (MA): step", f"{ag} ({ma}) of the CPU time", lora, "sft.py"


def _ranks() -> Cells:
    alike: dict[str, list[str]] = {}
    for layout, title in LAYOUTS.items():
        methods = kept("ranks")["layouts"][layout]
        share = methods["hift"]["bytes_per_step"] / methods["dense"]["bytes_per_step"]
        alike.setdefault(f"{share:.3f}", []).append(title)
    shares = "; ".join(f"{', '.join(titles)}: {share}" for share, titles in alike.items())
    what = "HiFT, several ranks: bytes sent per rank and step, share of dense"
    return what, shares, "dense, same layout", "ranks.py"
