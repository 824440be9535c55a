"""How `benchmarks/claims.py` decides whether a claim held, and which runs `evidence.py` sets beside dense ones."""

import sys
from typing import Any

import pytest

from tests.conftest import CHECKOUT

sys.path.append(str(CHECKOUT / "benchmarks"))
import evidence
from claims import CLAIMS, IDEAS, Claim, Relation
from measured_row import MeasuredRow

LOW, MIDDLE, OVERLAPS, HIGH = (1.0, 1.1), (1.4, 1.6), (1.5, 1.7), (2.0, 2.1)


def measured(*values: float, figure: str = "loss") -> MeasuredRow:
    return MeasuredRow(figure=figure, values=values, rate=1e-3, is_at_edge=False, peak_bytes=1)


@pytest.mark.parametrize(
    ("relation", "first", "second", "verdict"),
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
    relation: Relation, first: tuple[float, ...], second: tuple[float, ...], verdict: str, figure: str
) -> None:
    # More is better of an accuracy: one minus a tenth of the loss keeps the order of what is good.
    one, other = (
        measured(*(values if figure == "loss" else (1 - value / 10 for value in values)), figure=figure)
        for values in (first, second)
    )
    claim = Claim(text="", source="", relation=relation, rows=("one", "other"))
    assert claim.verdict({"one": one, "other": other}).startswith(f"**{verdict}**: {one}; {other}")


def test_three_are_alike_only_if_no_two_differ() -> None:
    claim = Claim(text="", source="", relation="alike", rows=("a", "b", "c"))
    chain = {"a": measured(1.0, 1.2), "b": measured(1.1, 1.5), "c": measured(1.4, 1.6)}
    assert claim.verdict(chain).startswith("**not held**")
    assert claim.verdict(chain | {"c": measured(1.15, 1.6)}).startswith("**held**")


def test_nothing_is_said_of_what_was_not_run_or_had_one_seed() -> None:
    claim = Claim(text="", source="", relation="better", rows=("one", "other"))
    assert claim.verdict({"one": measured(*LOW)}) == ""
    assert claim.verdict({"one": measured(*LOW), "other": measured(3.0)}) == ""


def test_each_claim_is_of_known_rows() -> None:
    assert {name for claim in (*CLAIMS, *IDEAS) for name in claim.rows} <= evidence.ROWS.keys()
    assert all(len(claim.rows) == 2 for claim in (*CLAIMS, *IDEAS) if claim.relation != "alike")


def test_a_task_waits_for_its_dense_row_and_a_row_that_failed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, failure: str | None = None) -> dict[str, Any]:
        run = {"after": {"eval_loss": 1.5}, "rate": 1e-3, "peak_bytes": {"device": 1}}
        return {"name": name, "runs": [] if failure else [run], "is_at_edge": False, "failure": failure}

    content = {"language": [row("dense"), row("lisa", "refused")], "retrieval": [row("lisa")]}
    monkeypatch.setattr(evidence, "kept", lambda name: content)
    assert evidence.read_results() == {"language": {"dense": measured(1.5)}}
    assert "retrieval" not in evidence.quality_table() and "`dense`" in evidence.quality_table()


def test_at_equal_time_the_longest_run_that_fits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"m1": 1.0, "m5": 2.0, "m9": 2.5, "m17": 4.0, "lora": 0.5, "all": 9.0}
    points = [
        {"card": "4090", "fits": True, "setting": setting, "tokens": tokens, "need_bytes": (5 + place) * 2**30}
        | {"seconds_per_update": each if tokens < 32768 else 9.0}
        for place, (setting, each) in enumerate(seconds.items())
        for tokens in (512, 4096, 32768)
    ]
    rows = {"dense": 1.0, "hift-1": 2.0, "hift-1-x4": 1.5, "hift-1-x8": 1.2, "hift-2": 1.9, "hift-4": 1.8}
    rows |= {"hift-4-x2": 1.01, "lora-16-x4": 0.5, "lora-64": 1.3, "lora-64-x8": 0.99}
    monkeypatch.setattr(evidence, "kept", lambda name: {"points": points})
    of_task: dict[str, Any] = {name: measured(loss, loss) for name, loss in rows.items()}
    monkeypatch.setattr(evidence, "read_results", lambda: {"language": of_task})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in evidence.time_table().split("\n")[2:-1]]
    found = [row[4].partition(":")[0] for row in cells]
    assert found[:5] == ["`hift-1-x4`", "`hift-2`", "`hift-4-x2`", "`lora-64-x8`", "`lora-16-x4`"]
    assert found[10:] == ["`hift-1`", "`hift-2`", "`hift-4`", "`lora-64`"]
    assert [row[3] for row in cells[:4]] == ["4.5", "3.6", "2.2", "18.0"]
    assert [row[4].rpartition(" ")[2] for row in cells[2:4]] == ["**+1.0%**", "**-1.0%**"]
    assert cells[0][2] == "6.0 GiB, 1.20 of m = 1's"


def test_the_map_has_the_updates_of_each_card_and_a_gap_where_a_setting_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def point(card: str, setting: str, tokens: int, seconds: float | None) -> dict[str, Any]:
        return {"card": card, "setting": setting, "tokens": tokens, "fits": seconds is not None} | (
            {} if seconds is None else {"seconds_per_update": seconds}
        )

    points = [
        point("4090", "all", 512, 9.0),
        point("4090", "m5", 512, 2.0),
        point("4090", "lora", 512, None),
        point("H100", "all", 4096, 3.0),
        point("H100", "lora", 4096, 4.0),
        point("3090", "m5", 512, 1.0),
    ]
    monkeypatch.setattr(evidence, "kept", lambda name: {"points": points})
    lines = evidence.map_table().split("\n")
    heads, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in [lines[0], *lines[2:]])
    shown = [{head: cell for head, cell in zip(heads, row, strict=True) if cell} for row in rows]
    assert shown == [
        {"Card": "4090", "Tokens an update": "512", "all: dense": "1 (9.00 s)", "5 layers of 34 (m = 1 of 8)": "4.5"},
        {"Card": "H100", "Tokens an update": "4,096", "all: dense": "1 (3.00 s)", "LoRA, r 64": "0.8"},
    ]
