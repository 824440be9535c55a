"""Planned tokens a second against those that others have published.

Each run of a software on a card gives one figure away: its efficiency, the share of the card's peak that it reaches, is
fitted on one row, named first, and the other rows are predicted with it. A row alone would prove nothing. Four
predictions have a target, 20 %; the others stand beside with their errors and the part of the step that explains them.
Nothing is run but plans.

    OMP_NUM_THREADS=1 python benchmarks/plan_speeds.py          # ten minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/plan_speeds.py --groups Qwen
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from environment import record_environment
from markdown_table import markdown_table
from result_files import RESULTS, read_json, write_json
from transformers import AutoConfig, PreTrainedConfig

from slivertune.planning.cards import card_named
from slivertune.planning.collectives import mean_state_bytes
from slivertune.planning.configs import find_model
from slivertune.planning.make import make_plan
from slivertune.planning.planned_time import PlannedTime, plan_time
from slivertune.planning.request import PlanRequest

TARGET = 0.2
_MOST = 1.15


def _qwen_2_5(*, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
    }


MODELS: dict[str, dict[str, Any]] = {
    # Of the first Qwen, whose own code the transformers library does not have, in the shapes of a Llama.
    "qwen-7b": {
        "model_type": "llama",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen-2.5-7b": _qwen_2_5(hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4),
    "qwen-2.5-14b": _qwen_2_5(hidden=5120, intermediate=13824, layers=48, heads=40, kv_heads=8),
}
"""Those whose figures do not come with the library."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A run that somebody has published."""

    name: str
    model: str
    settings: dict[str, Any]
    tokens_per_second: float
    has_target: bool = False
    is_paged: bool = False
    """Whether state lies in unified memory, more than there is room for: each page comes when the update touches it,
    and another leaves for it, one after the other, with nothing beside them."""
    explained_by: str = ""
    """What of the error is known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one software on one card; the efficiency is fitted on the first."""

    name: str
    source: str
    card: str
    rows: tuple[Row, ...]
    assumed: str = ""
    """What the authors don't say."""
    is_compiled: bool = False
    """Whether forward and backward were compiled, or their kernels fused by hand."""


QWEN = {"method": "lora", "lora_rank": 64, "precision": "bf16", "gradient_checkpointing": True, "batch_size": 1}
TORCHTUNE = {"precision": "bf16", "gradient_checkpointing": True, "batch_size": 2, "seq_length": 2048}
LARGE = {"precision": "bf16", "gradient_checkpointing": True, "batch_size": 4, "seq_length": 2048}
"""524,288 tokens an update."""
STREAMED = {"layout": "zero3", "offload_parameters": True, "gradient_checkpointing": True, "precision": "bf16"}
PEFT = {"precision": "bf16", "batch_size": 4, "seq_length": 210}

GROUPS = (
    Group(
        name="Qwen",
        source="README of Qwen, LoRA on one A100",
        card="A100-80GB",
        assumed="checkpointed",
        rows=(
            Row(
                name="Qwen-7B, LoRA r 64, 8 x (1 x 2,048)",
                model="qwen-7b",
                settings={**QWEN, "seq_length": 2048, "gradient_accumulation_steps": 8},
                tokens_per_second=8 * 2048 / 5.2,
            ),
            Row(
                name="the same, 8 x (1 x 8,192)",
                model="qwen-7b",
                settings={**QWEN, "seq_length": 8192, "gradient_accumulation_steps": 8},
                tokens_per_second=8 * 8192 / 21.3,
                has_target=True,
            ),
        ),
    ),
    Group(
        name="torchtune",
        source="README of torchtune, Llama-3.1-8B on one 4090",
        card="4090",
        is_compiled=True,
        rows=(
            Row(
                name="8B, LoRA r 8, 2 x 2,048, compiled",
                model="llama-3-8b",
                settings={
                    **TORCHTUNE,
                    "method": "lora",
                    "lora_rank": 8,
                    "lora_target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
                },
                tokens_per_second=3083,
            ),
            Row(
                name="8B, full, paged 8-bit AdamW, stepped in the backward, compiled",
                model="llama-3-8b",
                settings={**TORCHTUNE, "method": "dense", "optimizer": "adamw8bit"},
                tokens_per_second=1650,
                has_target=True,
                is_paged=True,
            ),
        ),
    ),
    Group(
        name="LLMQ",
        source="README of LLMQ, 4090, bf16, block recomputation, state on the host",
        card="4090",
        assumed="the models are Qwen2.5's, sequences of 2,048; its kernels are fused by hand; copies hide in updates "
        "of 524,288 tokens",
        is_compiled=True,
        rows=(
            Row(
                name="7B, dense AdamW",
                model="qwen-2.5-7b",
                settings={**LARGE, "method": "dense", "gradient_accumulation_steps": 64},
                tokens_per_second=2800,
            ),
            Row(
                name="14B, dense AdamW",
                model="qwen-2.5-14b",
                settings={**LARGE, "method": "dense", "gradient_accumulation_steps": 64},
                tokens_per_second=1300,
                has_target=True,
            ),
        ),
    ),
    Group(
        name="ZeRO-3",
        source="README of LLMQ: LLaMA-Factory with DeepSpeed ZeRO-3 offload, 4090",
        card="4090",
        assumed="the models are Qwen2.5's, micro-batches of 4 x 2,048, about half a million tokens an update; fused "
        "kernels",
        is_compiled=True,
        rows=(
            Row(
                name="7B, ZeRO-3 offload",
                model="qwen-2.5-7b",
                settings={**LARGE, **STREAMED, "method": "dense", "gradient_accumulation_steps": 64},
                tokens_per_second=2523,
            ),
            Row(
                name="14B, ZeRO-3 offload",
                model="qwen-2.5-14b",
                settings={**LARGE, **STREAMED, "method": "dense", "gradient_accumulation_steps": 64},
                tokens_per_second=1135,
                has_target=True,
            ),
        ),
    ),
    Group(
        name="SlideFormer",
        source="SlideFormer's comparison: DeepSpeed ZeRO-3 offload, 8B",
        card="4090",
        assumed="a card as fast as a 4090; Llama-3.1-8B in one micro-batch of 1,024 tokens a sequence; fused kernels",
        is_compiled=True,
        rows=tuple(
            Row(
                name=f"8B, ZeRO-3 offload, {tokens:,} tokens an update",
                model="llama-3-8b",
                settings={**STREAMED, "method": "dense", "batch_size": tokens // 1024, "seq_length": 1024},
                tokens_per_second=speed,
                explained_by="how fast its host updates is not said; 40 GB/s of memory is assumed",
            )
            for tokens, speed in ((32768, 1791), (16384, 1373), (8192, 914))
        ),
    ),
    Group(
        name="PEFT",
        source="PEFT's method comparison, Llama-3.2-3B on an L40S",
        card="L40S",
        assumed="four sequences of 210 tokens; not checkpointed",
        rows=(
            Row(
                name="3B, full, about 840 tokens an update",
                model="llama-3.2-3b",
                settings={**PEFT, "method": "dense"},
                tokens_per_second=2310,
            ),
            Row(
                name="3B, LoRA r 64 (q, v)",
                model="llama-3.2-3b",
                settings={
                    **PEFT,
                    "method": "lora",
                    "lora_rank": 64,
                    "lora_target_modules": ("q_proj", "v_proj"),
                },
                tokens_per_second=6650,
                explained_by="such batches are too small for the card: what else a step takes is charged to products",
            ),
        ),
    ),
)


def config_of(model: str) -> PreTrainedConfig:
    """The configuration of a row's model."""
    if model not in MODELS:
        return find_model(model).config
    config: PreTrainedConfig = AutoConfig.for_model(**MODELS[model])
    return config


class PlannedRow:
    """A row, planned once; its time at any efficiency.

    Args:
        row: The row.
        group: The row's.
    """

    def __init__(self, row: Row, group: Group) -> None:
        self._card, self._is_compiled, self._is_paged = card_named(group.card), group.is_compiled, row.is_paged
        self._plan = make_plan(PlanRequest(**row.settings), config_of(row.model))

    def at(self, efficiency: float) -> PlannedTime:
        """What it takes where so much of the peak is reached."""
        rates = self._card.rates(efficiency=efficiency, is_compiled=self._is_compiled)
        time = plan_time(self._plan, rates)
        if not self._is_paged:
            return time
        pages = 2 * mean_state_bytes(self._plan) / rates.bus_bandwidth
        update = dataclasses.replace(time.update, waiting={**time.update.waiting, "pages": pages})
        return dataclasses.replace(time, update=update)


def fitted(planned: PlannedRow, tokens_per_second: float) -> float | None:
    """The efficiency at which a row takes what was published; None where none is fast enough.

    Cards run above the clock for which their vendors give the peak, so that it may be a little more than 1.
    """
    if planned.at(_MOST).tokens_per_second < tokens_per_second:
        return None
    low, high = 0.01, _MOST
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if planned.at(middle).tokens_per_second < tokens_per_second else (low, middle)
    return high


def predict(group: Group) -> dict[str, Any]:
    """Fit a group's first row, and predict the others."""
    rows: list[dict[str, Any]] = []
    efficiency: float | None = None
    for index, row in enumerate(group.rows):
        planned = PlannedRow(row, group)
        if index == 0:
            efficiency = fitted(planned, row.tokens_per_second)
            if efficiency is None:
                raise ValueError(f"{row.name}: {row.tokens_per_second} tokens a second are more than the card can do")
        assert efficiency is not None
        time = planned.at(efficiency)
        error = time.tokens_per_second / row.tokens_per_second - 1
        rows.append(
            {
                "name": row.name,
                "model": row.model,
                "settings": row.settings,
                "published_tokens_per_second": row.tokens_per_second,
                "planned_tokens_per_second": time.tokens_per_second,
                "error": error,
                "is_fitted": index == 0,
                "is_met": abs(error) <= TARGET if row.has_target else None,
                "explained_by": row.explained_by,
                "time": time.to_json(),
            }
        )
        speeds = f"{time.tokens_per_second:,.0f}, published {row.tokens_per_second:,.0f}"
        print(f"{group.name}: {row.name}: {speeds}", flush=True)
    about = {"name": group.name, "source": group.source, "card": group.card, "assumed": group.assumed}
    return {**about, "efficiency": efficiency, "rows": rows}


def table(groups: list[dict[str, Any]]) -> str:
    """The rows for people, in Markdown."""
    lines = []
    for group in groups:
        for row in group["rows"]:
            error = f"{100 * row['error']:+.1f} %"
            if row["is_fitted"]:
                error = f"fitted: {100 * group['efficiency']:.0f} % of the peak"
            if row["is_met"] is not None:
                error += f" ({'within' if row['is_met'] else 'not within'} {100 * TARGET:.0f} %)"
            speeds = [f"{row[f'{kind}_tokens_per_second']:,.0f}" for kind in ("published", "planned")]
            lines.append([group["source"], row["name"], *speeds, error])
    return markdown_table(["Source", "Run", "published", "planned", "error"], lines)


def main() -> None:
    """Predict, write the result after every group, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=[group.name for group in GROUPS], help="a part; all by default")
    parser.add_argument("--output", type=Path, default=RESULTS / "plan_speeds.json")
    arguments = parser.parse_args()
    by_name = {group["name"]: group for group in read_json(arguments.output).get("groups", [])}
    for group in GROUPS:
        if arguments.groups is None or group.name in arguments.groups:
            by_name[group.name] = predict(group)
            found = [by_name[each.name] for each in GROUPS if each.name in by_name]
            write_json(arguments.output, {"environment": record_environment(), "target": TARGET, "groups": found})
    print(table([by_name[each.name] for each in GROUPS if each.name in by_name]))


if __name__ == "__main__":
    main()
