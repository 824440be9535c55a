"""The planned time of a run's updates: on a GPU it is said and kept, on a CPU there is none."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slivertune.planning.cards import card_named
from slivertune.planning.make import make_plan
from slivertune.planning.plan import Plan, add_allowance
from slivertune.planning.planned_time import PlannedTime, plan_time, with_room_ahead
from slivertune.training.output import planned_update as module
from slivertune.training.output.planned_update import OPERATOR_SECONDS, describe_update, note_of, plan_update, time_on
from tests.helpers.plan_requests import paper_request
from tests.planning.made import narrow_llama
from tests.training.tiny_runs import Runs

TINY = narrow_llama(3)
CARD = card_named("4090")


def run_on(device: str) -> tuple[Any, list[str]]:
    """A run that is about to train on a device, and what it says."""
    said: list[str] = []
    arguments = SimpleNamespace(training=SimpleNamespace(device=torch.device(device)))
    return SimpleNamespace(arguments=arguments, display=SimpleNamespace(say=said.append)), said


@cache
def plan_of(**settings: Any) -> Plan:
    return make_plan(paper_request(**{"seq_length": 32, **settings}), TINY)


@pytest.mark.parametrize("precision", ["fp32", "mixed_hi"])
def test_on_a_card_it_is_what_a_plan_for_that_card_says(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "card_here", lambda: CARD)
    run, said = run_on("cuda")
    plan = plan_of(precision=precision, gradient_accumulation_steps=3)
    planned = plan_update(run, plan)
    rates = CARD.rates(in_fp32=precision == "fp32")
    expected = plan_time(with_room_ahead(add_allowance(plan), CARD.memory_bytes), rates)
    assert planned.time == expected and planned.note == note_of(expected)
    assert said == [f"  time    {describe_update(expected)}"]
    assert f"({expected.tokens_per_second:,.0f} tokens/s at 60% of the card's peak, " in said[0]


def test_on_a_cpu_no_time_is_planned(runs: Runs) -> None:
    assert time_on(torch.device("cpu"), plan_of()) is None
    results = runs.train("out", "--packing", "--max_length", "32")
    out = " ".join(runs.printed().split())
    assert (results["planned_update"], results["planned_update_note"]) == (None, None)
    assert "  time  " not in out and f"tokens/s {results['tokens_per_second']:,.0f}" in out
    assert results["tokens_per_second"] == pytest.approx(2 * 32 * results["steps_per_second"])


def test_what_is_not_known_is_one_line_and_nothing_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "card_here", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card X")
    for device, reason in (("cuda", "the rates of Card X are not known"), ("mps", "the rates of a device 'mps' are")):
        run, said = run_on(device)
        planned = plan_update(run, plan_of())
        assert planned.time is None and planned.note is not None and reason in planned.note
        assert said == [f"  time    {planned.note}"]
    run, said = run_on("cuda")
    assert plan_update(run, None).note is None and said == []


def planned(**changes: Any) -> PlannedTime:
    return replace(plan_time(plan_of(), CARD.rates()), **changes)


def test_operators_that_python_issues_slower_than_the_card_computes_are_noted() -> None:
    time = planned()
    limit = time.seconds / OPERATOR_SECONDS
    assert note_of(replace(time, num_operators=0.9 * limit)) is None
    late = replace(time, num_operators=1.1 * limit)
    note = note_of(late)
    assert note is not None and note.endswith(f"to issue the {late.num_operators:,.0f} operators per update")
    assert describe_update(late).endswith(note)


def test_what_is_written_to_a_disk_is_said_with_the_time() -> None:
    assert "written to disk" not in describe_update(planned())
    assert "3.50 TiB per hour written to disk" in describe_update(
        planned(disk_bytes_per_update=3.5 * 2**40 * planned().seconds / 3600)
    )
