"""The tables of what SFT, TokenTune and several ranks cost, from the files under `results/`."""

from typing import Any

from markdown_table import markdown_table
from measured import LAYOUTS, MIB
from result_files import RESULTS, read_json

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


def sft() -> str:
    """Time and peak of a step beside LoRA's, without and with checkpointed layers."""
    content = read_json(RESULTS / "sft.json")
    heads = ["", "step / LoRA's (CPU time)", "reselection's share", "peak, MiB (in an estimation phase)"]
    rows = []
    for part in ("plain", "checkpointing"):
        times = content[part]["times"]["variants"]
        for name, title in _SFT.items():
            selects, is_timed = name.startswith("sft"), name in times
            begins = part == "checkpointing" and name == "lora"
            rows.append(
                [
                    ("*layers checkpointed:* " if begins else "") + title.format(rank=content["rank"]),
                    f"{times[name]['plain_ratio_to_lora']:.2f}" if is_timed else "not timed",
                    f"{100 * times[name]['reselection_share']:.1f} %" if selects and is_timed else "",
                    _sft_peak(content[part]["peaks"][name]),
                ]
            )
    return markdown_table(heads, rows)


def sft_in_chunks() -> str:
    """Peaks of a step with the loss in chunks, without and with checkpointed layers."""
    content = read_json(RESULTS / "sft.json")
    heads = ["8,192 tokens, loss in chunks", "peak, MiB (in an estimation phase)", "layers checkpointed"]
    parts = [content[part]["chunked_peaks"] for part in ("plain", "checkpointing")]
    return markdown_table(
        heads,
        ([_SFT[name].format(rank=content["rank"]), *(_sft_peak(part[name]) for part in parts)] for name in parts[0]),
    )


def _sft_peak(phases: dict[str, Any]) -> str:
    plain, estimating = (f"{phases[phase]['peak_bytes'] / MIB:.0f}" for phase in ("plain", "estimating"))
    return plain if plain == estimating else f"{plain} ({estimating})"


def tokentune() -> str:
    """Time of a step beside the dense one's, and bytes of activations."""
    variants = read_json(RESULTS / "tokentune.json")["variants"]
    heads = ["", "step (CPU time)", "saved for the backward, MiB", "most activations at a time, MiB"]
    return markdown_table(
        heads,
        (
            [
                _TOKENTUNE[name],
                f"{each['median_ratio']['cpu']:.2f}",
                f"{each['saved_bytes'] / MIB:.0f}",
                f"{each['peak_activation_bytes'] / MIB:.0f}",
            ]
            for name, each in variants.items()
        ),
    )


def token_gradients() -> str:
    """Cosines to the dense gradient, by pattern and share of the tokens."""
    rows = read_json(RESULTS / "token_gradients.json")["rows"]
    cosines = {(row["pattern"], row["ratio"]): row["cosine"] for row in rows}
    ratios = dict.fromkeys(row["ratio"] for row in rows)
    return markdown_table(
        ["", *(f"{100 * ratio:.0f} %" for ratio in ratios)],
        ([title, *(f"{cosines[name, ratio]:.2f}" for ratio in ratios)] for name, title in _PATTERNS.items()),
    )


def sent_by_ranks() -> str:
    """Megabytes that a rank sends in a step, by layout and method; layouts that send the same in one row."""
    content = read_json(RESULTS / "ranks.json")["layouts"]
    cells = {
        title: [_megabytes(content[layout][method]["bytes_per_step"]) for method in _METHODS]
        for layout, title in LAYOUTS.items()
    }
    alike: dict[tuple[str, ...], list[str]] = {}
    for title, row in cells.items():
        alike.setdefault(tuple(row), []).append(title)
    return markdown_table(["", *_METHODS.values()], ([", ".join(titles), *row] for row, titles in alike.items()))


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}" if num_bytes >= 1e6 else f"{num_bytes / 1e6:.2f}"
