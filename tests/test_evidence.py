"""How the benchmarks decide whether a claim held, and which runs they set beside dense ones at equal time."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CHECKOUT
from tests.helpers.kept_results import planned_point
from tests.helpers.models import tiny_llama

sys.path.append(str(CHECKOUT / "benchmarks"))
import evidence_tables
import planned_map
import result_files
from evidence_rows import MeasuredRow, verdict

LOW, MIDDLE, OVERLAPS, HIGH = (1.0, 1.1), (1.4, 1.6), (1.5, 1.7), (2.0, 2.1)


def measured(*values: float, figure: str = "loss") -> MeasuredRow:
    return MeasuredRow(figure=figure, values=values, rate=1e-3, is_at_edge=False, peak_bytes=1)


@pytest.mark.parametrize(
    ("relation", "first", "second", "expected"),
    [
        ("as good", LOW, HIGH, "held"),
        ("as good", HIGH, LOW, "not held"),
        ("as good", OVERLAPS, MIDDLE, "held"),
        ("better", LOW, HIGH, "held"),
        ("better", HIGH, LOW, "not held"),
        ("better", MIDDLE, OVERLAPS, "not decided"),
        ("alike", OVERLAPS, MIDDLE, "held"),
        ("alike", LOW, MIDDLE, "not held"),
    ],
)
@pytest.mark.parametrize("figure", ["loss", "accuracy"])
def test_ranges_that_do_not_overlap_decide(
    relation: str, first: tuple[float, ...], second: tuple[float, ...], expected: str, figure: str
) -> None:
    # More is better of an accuracy: one minus a tenth of the loss keeps the order of what is good.
    one, other = (
        measured(*(values if figure == "loss" else (1 - value / 10 for value in values)), figure=figure)
        for values in (first, second)
    )
    found = verdict(relation, ("one", "other"), {"one": one, "other": other})
    assert found.startswith(f"**{expected}**: {one}; {other}")


def test_three_are_alike_only_if_no_two_differ() -> None:
    chain = {"a": measured(1.0, 1.2), "b": measured(1.1, 1.5), "c": measured(1.4, 1.6)}
    assert verdict("alike", "abc", chain).startswith("**not held**")
    assert verdict("alike", "abc", chain | {"c": measured(1.15, 1.6)}).startswith("**held**")


def test_nothing_is_said_of_what_was_not_run_or_had_one_seed() -> None:
    assert verdict("better", ("one", "other"), {"one": measured(*LOW)}) == ""
    one_seed = verdict("better", ("one", "other"), {"one": measured(*LOW), "other": measured(3.0)})
    assert one_seed == f"one seed: {LOW[0]:.3f}; 3.000"


def test_each_claim_is_of_rows_that_are_asked_for_or_kept() -> None:
    asked, kept = evidence_tables.ASKED, result_files.kept("quality")
    known = asked["rows"].keys() | {row["name"] for rows in kept.values() for row in rows}
    pairs = [pair for idea in asked["ideas"] for pair in idea["pairs"]]
    assert {name for names in (*(claim["rows"] for claim in asked["claims"]), *pairs) for name in names} <= known
    assert {claim["relation"] for claim in asked["claims"]} <= {"as good", "better", "alike"}
    assert all(len(claim["rows"]) == 2 for claim in asked["claims"] if claim["relation"] != "alike")
    assert all(len(pair) == 2 for pair in pairs)


def test_a_task_waits_for_its_dense_row_and_a_row_that_failed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, failure: str | None = None) -> dict[str, Any]:
        run = {"after": {"eval_loss": 1.5}, "rate": 1e-3, "peak_bytes": {"device": 1}}
        return {"name": name, "runs": [] if failure else [run], "is_at_edge": False, "failure": failure}

    content = {"language": [row("dense"), row("lisa", "refused")], "retrieval": [row("lisa")]}
    monkeypatch.setattr(evidence_tables, "kept", lambda name: content)
    assert evidence_tables.read_results() == {"language": {"dense": measured(1.5)}}
    assert "docstrings" not in evidence_tables.quality_table() and "`dense`" in evidence_tables.quality_table()


def tables_of(text: str) -> dict[str, list[list[str]]]:
    """Return the cells of tables below titles in bold, heads left out."""
    found: dict[str, list[list[str]]] = {}
    for title, table in re.findall(r"^\*\*(.+)\*\*\n\n((?:\|.*(?:\n|$))+)", text, re.MULTILINE):
        found[title] = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return found


def test_at_equal_time_the_best_run_that_fits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"m1": 1.0, "m5": 2.0, "m9": 2.5, "m17": 4.0, "lora": 0.5, "all": 9.0}
    points = [
        {"card": "4090", "fits": True, "setting": setting, "tokens": tokens, "need_bytes": (5 + place) * 2**30}
        | {"time": {"seconds_per_update": each if tokens < 32768 else 9.0}}
        for place, (setting, each) in enumerate(seconds.items())
        for tokens in (512, 4096, 32768)
    ]
    rows = {
        "dense": 1.0,
        "hift-1": 2.0,
        "hift-1-x3": 1.4,
        "hift-1-x4": 1.5,
        "hift-1-x8": 1.2,
        "hift-2": 1.9,
        "hift-4": 1.8,
    }
    rows |= {"hift-4-x2": 1.01, "lora-16-x4": 0.5, "lora-64": 1.3, "lora-64-x8": 0.99}
    monkeypatch.setattr(planned_map, "kept", lambda name: {"points": points})
    of_task: dict[str, Any] = {name: measured(loss, loss) for name, loss in rows.items()}
    monkeypatch.setattr(planned_map, "read_results", lambda: {"language": of_task})
    planned, of_language = tables_of(planned_map.time_table()).values()
    found = [row[2] for row in of_language]
    assert found[:5] == ["`hift-1-x3`", "`hift-2`", "`hift-4-x2`", "`lora-64-x8`", "`lora-16-x4`"]
    assert found[10:] == ["`hift-1`", "`hift-2`", "`hift-4`", "`lora-64`", "`dense`"]
    # A way has its row in both tables, in the same order.
    assert [row[:2] for row in planned] == [row[:2] for row in of_language[:-1]]
    assert [row[3] for row in planned[:4]] == ["4.5", "3.6", "2.2", "18.0"]
    assert [row[4] for row in of_language[2:4]] == ["**+1.0%**", "**-1.0%**"]
    assert planned[0][2] == "6.0 GiB (1.20)"


def test_the_map_has_the_updates_of_each_card_and_a_gap_where_a_setting_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def point(card: str, setting: str, tokens: int, seconds: float | None) -> dict[str, Any]:
        return {"card": card, "setting": setting, "tokens": tokens, "fits": seconds is not None} | (
            {} if seconds is None else {"time": {"seconds_per_update": seconds}}
        )

    points = [
        point("4090", "all", 512, 9.0),
        point("4090", "m5", 512, 2.0),
        point("4090", "lora", 512, None),
        point("H100", "all", 4096, 3.0),
        point("H100", "lora", 4096, 4.0),
        point("3090", "m5", 512, 1.0),
    ]
    monkeypatch.setattr(planned_map, "kept", lambda name: {"points": points})
    lines = planned_map.map_table().split("\n")
    heads, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in [lines[0], *lines[2:]])
    shown = [{head: cell for head, cell in zip(heads, row, strict=True) if cell} for row in rows]
    assert shown == [
        {"Card": "4090", "Trained": "All layers (dense)", "512 tokens per update": "1 (9.00 s)"},
        {"Card": "4090", "Trained": "m = 1", "512 tokens per update": "4.5"},
        {"Card": "H100", "Trained": "All layers (dense)", "4,096 tokens per update": "1 (3.00 s)"},
        {"Card": "H100", "Trained": "LoRA, r 64", "4,096 tokens per update": "0.8"},
    ]


@pytest.mark.slow
def test_the_map_is_planned_by_the_command_line_with_the_settings_of_each_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"method": "hift", "precision": "mixed_hi", "layers_per_group": 2, "seq_length": 64}
    asked = {"card": "4090", "setting": "m1", "tokens": 512, "settings": settings}
    tiny_llama().config.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(planned_map, "kept", lambda name: {"model": str(tmp_path / "model"), "points": [asked]})
    monkeypatch.setattr(planned_map, "RESULTS", tmp_path)
    planned_map.plan_points()
    content = json.loads((tmp_path / "planned_map.json").read_text(encoding="utf-8"))
    (point,) = content["points"]
    words = ["plan", "--model", str(tmp_path / "model"), "--gpu", "4090", "--json"]
    words += [f"--{name}={value}" for name, value in settings.items()]
    said = subprocess.run([sys.executable, "-m", "slivertune", *words], check=True, capture_output=True, text=True)
    answer = json.loads(said.stdout)
    expected = {"fits": True, **{name: answer[name] for name in ("need_bytes", "host_bytes", "time")}}
    assert point == {**asked, **expected} and content["environment"]["processor"]
    monkeypatch.setattr(planned_map, "kept", lambda name: content)
    assert planned_map._points("4090") == {("m1", 512): point}


def test_a_bar_of_a_fixed_batch_has_the_memory_and_both_speeds_of_its_point() -> None:
    shown = planned_map.fixed_batch()
    nine, torchtune = shown["HiFT, 9 of 34 layers per group"], shown["torchtune: all weights, 8-bit state"]
    point = planned_point("4090", "m9-stays", 4096)
    assert (nine["gpu_bytes"], nine["host_bytes"]) == (point["need_bytes"], point["host_bytes"])
    # 34 layers by nines are four groups, so that a weight has its turn in every fourth update.
    speed = point["time"]["tokens_per_second"]
    assert (nine["tokens_per_second"], nine["weight_tokens_per_second"]) == (speed, speed / 4)
    assert (torchtune["gpu_bytes"], torchtune["host_bytes"]) == (18.9 * 2**30, None)
    assert [name for name, each in shown.items() if each["is_published"] != name.startswith("torchtune")] == []
