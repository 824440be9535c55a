"""The plans that the pages print are those that are made here; kept ones are in tests/test_figures.py."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from slivertune.cli import main
from tests.conftest import CHECKOUT
from tests.helpers.launching import run_python

pytestmark = pytest.mark.slow

PLAN, LONG, HIFT, PARKED, COMING = (
    CHECKOUT / "docs" / name for name in ("plan.md", "long-sequences.md", "hift.md", "parked.md", "coming-from.md")
)
GB, GIB = 10**9, 2**30


def words_of(page: Path) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


def plan(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    return dict(json.loads(capfd.readouterr().out))


def test_the_plan_that_is_shown_is_the_one_that_is_made() -> None:
    page = PLAN.read_text(encoding="utf-8")
    command, shown = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    made = run_python("-m", *command.split(), cwd=CHECKOUT, COLUMNS="120").stdout
    # A printed command begins as the one that was typed.
    made = made.replace(f"{sys.executable} -m slivertune", "slivertune")
    lines = shown.splitlines()
    # The page ends with the command; notes and hints stand below it.
    assert lines[-1].startswith("to run it: ")
    assert [line.rstrip() for line in made.splitlines()][: len(lines)] == lines
    waits = re.search(r"offloaded to host memory +│ (\S+ GiB)", shown)
    assert waits is not None
    assert f"warning: needs {waits[1]} of host memory, and no limit was given" in words_of(PLAN)


def test_what_7b_needs_with_and_without_checkpointing_is_what_the_page_says(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-2-7b", "--layers_per_group", "1", "--batch_size", "1", "--seq_length", "512")
    whole = plan(capfd, *words)["peak"]
    checkpointed = plan(capfd, *words, "--gradient_checkpointing")["peak"]
    stepped = plan(capfd, *words, "--gradient_checkpointing", "--gradients", "stepped")["peak"]
    assert whole["phase"] == "forward" and whole["group"] == 1, "of the lowest block's turn"
    assert (checkpointed["phase"], stepped["phase"]) == ("step", "backward")
    rows = (
        (
            f"| no checkpointing | {whole['total_bytes'] / GB:.1f} GB: {whole['parameter_bytes'] / GB:.1f} weights, "
            f"{whole['residual_bytes'] / GB:.1f} activations | forward of the lowest block's turn |"
        ),
        f"| `--gradient_checkpointing` | {checkpointed['total_bytes'] / GB:.1f} GB | step |",
        f"| the same, and `--gradients stepped` | {stepped['total_bytes'] / GB:.1f} GB | backward |",
    )
    assert "(`--layers_per_group 1`) at 1 x 512. The 32 blocks keep them" in words_of(PLAN)
    assert " ".join(rows) in words_of(PLAN)


def test_models_larger_than_the_card_need_what_the_page_of_hift_says(capfd: pytest.CaptureFixture[str]) -> None:
    words = re.findall(
        r"By `slivertune plan --model (\S+) ([^`]*)`, \S+ needs ([\d.]+) GiB of the GPU, [^.`]*; with `--model (\S+)` "
        r"([\d.]+) GiB, with `--model (\S+)` ([\d.]+) GiB",
        words_of(HIFT),
    )
    ((first, options, *others),) = words
    for model, said in zip((first, *others[1::2]), others[::2], strict=True):
        found = plan(capfd, "--model", model, *options.split())
        assert f"{found['need_bytes'] / GIB:.1f}" == said, model


def test_a_lora_over_parked_weights_needs_what_the_page_says(capfd: pytest.CaptureFixture[str]) -> None:
    page = words_of(PARKED)
    (command,) = re.findall(r"`slivertune plan (.*?)`", page)
    rows = re.findall(r"\| (none|`[^`|]*`) \| ([\d.]+) GiB \| ([\d.]+) GiB \| ([\d,]+) (?=\|)", page)
    assert len(rows) == 4
    for options, peak, host, tokens in rows:
        found = plan(capfd, *command.split(), *("" if options == "none" else options.strip("`")).split())
        assert f"{found['peak_bytes'] / GIB:.1f}" == peak, options
        assert f"{found['host_bytes'] / GIB:.1f}" == host, options
        assert f"{found['time']['tokens_per_second']:,.0f}" == tokens, options
        if "host" in options:
            # The targets: 3.5 GiB with codes, 4.5 GiB with exact weights.
            assert found["peak_bytes"] <= (3.5 if "nf4" in options else 4.5) * GIB


def test_the_seconds_of_full_with_and_without_compiled_tiles_are_planned(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3.1-8b", "--method", "full", "--batch_size", "1", "--seq_length", "512", "--gpu", "4090")
    compiled, uncompiled = (
        plan(capfd, *words, "--compile_step", choice)["time"]["seconds_per_update"] for choice in ("auto", "never")
    )
    begin = "Llama-3.1-8B at 1 x 512 tokens is then planned at"
    assert f"{begin} {compiled:.2f} s per update on a 4090, uncompiled at {uncompiled:.2f} s." in words_of(HIFT)


def test_what_takes_torchtunes_place_is_planned_at_what_the_page_says(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3-8b", "--layers_per_group", "all", "--steps_per_group", "1", "--gradients", "stepped")
    words += ("--max_grad_norm", "0", "--gradient_checkpointing", "--batch_size", "2", "--seq_length", "2048")
    settings = (
        ("--optim", "adamw_bnb_8bit", "--precision", "bf16"),
        ("--optim", "adamw_torch", "--precision", "mixed_hi"),
    )
    as_shown, exact = (plan(capfd, *words, "--gpu", "4090", *each)["time"]["tokens_per_second"] for each in settings)
    said = f"The settings above are planned at {as_shown:,.0f} tokens/s for the same batch (2 x 2,048 tokens), "
    assert f"{said}AdamW with fp32 masters at {exact:,.0f}." in words_of(COMING)


def test_the_table_of_long_sequences_is_planned(capfd: pytest.CaptureFixture[str]) -> None:
    common = (
        "--model",
        "llama-3.1-8b",
        "--layers_per_group",
        "1",
        "--gradient_checkpointing",
        "--batch_size",
        "1",
        "--seq_length",
        "131072",
    )
    offloaded, tiled = ("--offload_activations",), ("--token_tile_size", "8192")
    rows = {
        "as it is": (),
        "`--offload_activations`": offloaded,
        "`--token_tile_size 8192`": tiled,
        "both": (*offloaded, *tiled),
        "both, and [`--weights host`](hift.md#where-weights-are-stored)": (*offloaded, *tiled, "--weights", "host"),
    }
    page = LONG.read_text(encoding="utf-8")
    plans = {title: plan(capfd, *common, *options) for title, options in rows.items()}
    waiting = (plans["both"]["host_bytes"] - plans["`--token_tile_size 8192`"]["host_bytes"]) / GIB
    for title, each in plans.items():
        activations = f"{each['peak']['residual_bytes'] / GIB:.1f} GiB" if "host`]" not in title else ""
        on_host = f"{waiting:.0f} GiB" if "--offload_activations" in rows[title] else ""
        cells = [
            title,
            f"{each['peak_bytes'] / GIB:.1f} GiB",
            activations,
            f"{each['need_bytes'] / GIB:.1f} GiB",
            on_host,
        ]
        assert re.sub(r" +", " ", f"| {' | '.join(cells)} |") in page
    both = plans["both"]["peak"]
    assert f"bf16 weights ({both['parameter_bytes'] / GIB:.2f} GiB)" in words_of(LONG)
    assert f"All of the {both['residual_bytes'] / GIB:.1f} GiB that are left" in words_of(LONG)
