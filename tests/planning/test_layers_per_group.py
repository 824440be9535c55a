"""The number of layers a step that is chosen for a card, against plans of every number that is tried."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slivertune.cli import main
from slivertune.planning import command, layers_per_group
from slivertune.planning.cards import Card, card_named, find_card, known_cards
from slivertune.planning.layers_per_group import HIDDEN_SHARE, choose_layers_per_group
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.planned_time import plan_time
from slivertune.planning.request import PlanRequest
from tests.helpers.plan_requests import paper_request
from tests.planning.made import narrow_llama, plan_made_once, write_config

pytestmark = pytest.mark.usefixtures("plans_made_once")

TINY = narrow_llama(2)

REQUEST = paper_request(precision="mixed_hi", seq_length=32)
TRIED = (4, 2, 1)
"""The embedding, two blocks and the head: in one group, two (of three asked for), four."""
PLENTY = Limits(device_bytes=10**12)


def card_of(flops: float) -> Card:
    """A card with a bus of 125 MB/s, which reaches 80 % of it, and 60 % of so many operations a second."""
    return replace(card_named("4090"), peak_flops=flops, memory_bandwidth=1e12, bus_bandwidth=1.25e8)


@cache
def need(m: int) -> MemoryRequirement:
    return add_allowance(plan_made_once(replace(REQUEST, layers_per_group=m), TINY))


@cache
def naive_share(m: int, flops: float, device_bytes: int) -> float:
    """With all that is left loaded ahead, but for a sixteenth of the card."""
    left = device_bytes - need(m).device_bytes - card_of(flops).memory_bytes // 16
    return share_of(m, flops, prefetch_bytes=max(0, left))


def share_of(m: int, flops: float, *, prefetch_bytes: int) -> float:
    """The part of an update in which computation stands still."""
    plan = plan_made_once(replace(REQUEST, layers_per_group=m, prefetch_bytes=prefetch_bytes), TINY)
    time = plan_time(plan, card_of(flops).rates())
    return sum(time.update.waiting.values()) / time.seconds


@pytest.mark.parametrize(
    ("flops", "limits", "expected"),
    [
        pytest.param(1e9, PLENTY, 4, marks=pytest.mark.slow),
        (3e9, PLENTY, 2),
        (1e8, Limits(device_bytes=0, host_bytes=10**9), 2),
        pytest.param(1e10, PLENTY, 1, marks=pytest.mark.slow),
    ],
)
def test_the_most_layers_that_fit_and_hide_their_copies_are_chosen(
    flops: float, limits: Limits, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limits is not PLENTY:
        # Between what four layers need, and two.
        assert need(2).device_bytes < need(4).device_bytes
        limits = replace(limits, device_bytes=(need(2).device_bytes + need(4).device_bytes) // 2)
    shares = {m: naive_share(m, flops, limits.device_bytes) for m in TRIED if need(m).fits(limits)}
    hidden = [m for m in TRIED if shares.get(m, 1.0) <= HIDDEN_SHARE]
    assert (hidden or [1])[0] == expected

    told: list[str] = []
    choice = choose_layers_per_group(REQUEST, TINY, card_of(flops), limits, tell=told.append)
    assert choice.chosen.layers_per_group == expected
    tried = [trial.layers_per_group for trial in choice.trials]
    assert tried == list(TRIED[: TRIED.index(expected) + 1])
    for trial, line in zip(choice.trials, told, strict=True):
        assert trial.exposed_share == shares.get(trial.layers_per_group)
        assert trial.requirement == need(trial.layers_per_group)
        assert ("does not fit" in line) == (trial.exposed_share is None)
    said = choice.reason
    if expected == 4:
        assert "all layers" in said
    elif expected == 1:
        assert "no number overlaps its copies" in said
    else:
        assert ("4 would not fit" if limits is not PLENTY else "4 would stall for copies") in said
    assert json.loads(json.dumps(choice.to_json()))["layers_per_group"] == expected


def test_bytes_for_loading_ahead_that_were_set_are_taken() -> None:
    """Nothing ahead leaves more to wait for."""
    flops = 3e9
    choice = choose_layers_per_group(REQUEST, TINY, card_of(flops), PLENTY, prefetch_bytes=0)
    assert choice.trials[0].exposed_share == share_of(4, flops, prefetch_bytes=0)
    assert choice.trials[0].exposed_share > naive_share(4, flops, PLENTY.device_bytes)


def test_what_stays_for_a_turn_of_several_updates_is_not_waited_for() -> None:
    several = replace(REQUEST, steps_per_group=40)
    card, limits = card_of(1e10), PLENTY
    at_once = choose_layers_per_group(REQUEST, TINY, card, limits)
    assert at_once.chosen.layers_per_group == 1
    choice = choose_layers_per_group(several, TINY, card, limits)
    trial = choice.chosen
    assert trial.layers_per_group > 1 and trial.exposed_share is not None and trial.exposed_share <= HIDDEN_SHARE
    # Nothing ahead is copied in every update, as with one a turn.
    bare, usual = (choose_layers_per_group(each, TINY, card, limits, prefetch_bytes=0) for each in (several, REQUEST))
    assert bare.chosen.layers_per_group == usual.chosen.layers_per_group == 1
    assert bare.chosen.seconds_per_step == pytest.approx(usual.chosen.seconds_per_step, rel=0.01)


def test_what_fits_nowhere_is_an_error_that_says_what_is_missing() -> None:
    for limits, part in (
        (Limits(device_bytes=need(1).device_bytes - 1), "on the GPU"),
        (Limits(device_bytes=10**12, host_bytes=1000), r"there are .* and 1000 B\. Run slivertune plan .*--fit"),
    ):
        with pytest.raises(ValueError, match=part):
            choose_layers_per_group(REQUEST, TINY, card_of(1e9), limits)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"method": "dense", "precision": "fp32"}, "method='hift', not 'dense'"),
        ({"layout": "ddp", "num_gpus": 2}, "layout='single', not 'ddp'"),
        ({"state": "disk"}, "state='disk' .* use state='host'"),
        ({"state": "device"}, "state='device'"),
    ],
)
def test_runs_without_copies_over_one_bus_are_refused(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        choose_layers_per_group(replace(REQUEST, **settings), TINY, card_of(1e9), PLENTY)


def test_the_card_that_is_here_is_found_by_the_name_that_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no CUDA device here .* Name one by --gpu \(3060-12GB, 3090, "):
        find_card(None)
    assert find_card("4090") is known_cards()["4090"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = [name for card in known_cards().values() for name in card.device_names]
    assert len(set(names)) == len(names) >= len(known_cards())
    for key, card in known_cards().items():
        for name in card.device_names:
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
            size = SimpleNamespace(total_memory=0.96 * card.memory_bytes)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda size=size: size)
            assert find_card(None) is known_cards()[key]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 5060 Ti")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=8 * 2**30))
    with pytest.raises(ValueError, match=r"rates of NVIDIA GeForce RTX 5060 Ti are not known"):
        find_card(None)  # it is known with 16 GB
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090 Laptop GPU")
    with pytest.raises(ValueError, match=r"rates of NVIDIA GeForce RTX 4090 Laptop GPU are not known\. Name one by"):
        find_card(None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def answer_of(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    assert main(["plan", *words, "--json"]) == 0
    captured = capfd.readouterr()
    return json.loads(captured.out), captured.err


def test_plan_chooses_says_why_and_prints_the_command(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--model", str(tiny), "--precision", "mixed_hi", "--layers_per_group", "auto", "--gpu", "4090")
    values, said = answer_of(capfd, *words)
    chosen = values["layers_choice"]["layers_per_group"]
    assert values["request"]["layers_per_group"] == chosen
    # As planned alone, and as the command has it.
    alone, _ = answer_of(capfd, *words[:4], "--layers_per_group", str(chosen))
    assert {name: values[name] for name in ("peak", "command", "need_bytes")} == {
        name: alone[name] for name in ("peak", "command", "need_bytes")
    }
    assert values["fit"]["limit_bytes"] == 24 * 2**30 and values["fit"]["fits"]
    for trial in values["layers_choice"]["trials"]:
        assert f"{trial['layers_per_group']} layer" in said
    assert main(["plan", *words]) == 0
    printed = capfd.readouterr().out
    assert f"chose {chosen} layers_per_group for a GeForce RTX 4090 (99 TFLOP/s, 25.6 GB/s each way): " in printed
    assert values["layers_choice"]["reason"] in " ".join(printed.split())


def test_a_search_finds_settings_for_one_layer_and_then_the_most_layers_under_these(
    tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def choose(request: PlanRequest, *args: Any, **kwargs: Any) -> Any:
        asked.append((request, args[2]))
        return choose_layers_per_group(request, *args, **kwargs)

    monkeypatch.setattr(command, "choose_layers_per_group", choose)
    words = ("--model", str(tiny), "--batch_size", "64", "--layers_per_group", "auto", "--gpu", "4090")
    parts = ("--batch_size", "32", "--gradient_accumulation_steps", "2")
    one, _ = answer_of(capfd, *words[:2], "--precision", "mixed_hi", *parts)
    values, _ = answer_of(capfd, *words, "--fit", str(one["need_bytes"]), "--fit_host", "1GiB")
    ((request, limits),) = asked
    assert limits == Limits(device_bytes=one["need_bytes"], host_bytes=2**30)
    assert (request.layers_per_group, request.batch_size, request.gradient_accumulation_steps) == (1, 32, 2)
    assert values["request"]["batch_size"] == 32
    assert values["need_bytes"] <= one["need_bytes"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--layers_per_group", "auto"), "there is no CUDA device here whose rates could be used. Name one by --gpu"),
        (
            ("--layers_per_group", "auto", "--gpu", "5090x"),
            "gpu='5090x' must be one of '3060-12GB', '3090', '4060Ti-16GB'",
        ),
        (("--layers_per_group", "auto", "--sweep", "seq_length=8,9"), "for one run, without --sweep"),
        (
            ("--layers_per_group", "many"),
            "--layers_per_group 'many' must be an integer, a share of the layers",
        ),
        (("--layers_per_group", "auto", "--gpu", "4090", "--method", "dense"), "only --method hift reads this"),
    ],
)
def test_what_can_not_be_chosen_is_one_line_and_code_2(
    words: tuple[str, ...],
    part: str,
    tiny: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(layers_per_group, "Planner", None)
    assert main(["plan", "--model", str(tiny), *words]) == 2
    error = capfd.readouterr().err
    assert error.startswith("slivertune plan: error: ") and part in error and error.count("\n") == 1
