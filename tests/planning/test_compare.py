"""All ways of training a model, against planning each by itself."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slivertune.hift.config import ALL_LAYERS
from slivertune.planning.cards import card_named
from slivertune.planning.compare import Comparison, Question, Row, Way, advice, compare, in_order, rows_of, ways_of
from slivertune.planning.comparison_plot import comparison_figure
from slivertune.planning.comparison_report import describe_row, describe_trained, print_comparison
from slivertune.planning.configs import ModelFigures
from slivertune.planning.make import make_plan
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.planned_time import PlannedTime, plan_time, with_room_ahead
from slivertune.planning.plot import save
from slivertune.planning.request import PlanRequest
from slivertune.planning.time_formula import MeanUpdate
from tests.helpers.plan_requests import paper_request, run_plan
from tests.helpers.ranks import quick
from tests.planning.made import moment, simple_plan, tiny_model, write_config

pytestmark = pytest.mark.filterwarnings(r"ignore:the default number of weights \(as many as LoRA of rank 64")

MIB = 2**20
CARD = card_named("4090")
GIVEN: dict[str, Any] = {"seq_length": 64}
SMALLEST = tiny_model(num_hidden_layers=1)
"""For what each block would only repeat."""


def question(device_bytes: int, model: ModelFigures = SMALLEST) -> Question:
    return Question(model=model, given=GIVEN, limits=Limits(device_bytes=device_bytes), card=CARD, efficiency=0.6)


def need(request: PlanRequest, model: ModelFigures = SMALLEST) -> MemoryRequirement:
    return add_allowance(make_plan(request, model.config))


def largest_by_trying_all(request: PlanRequest, limits: Limits, model: ModelFigures) -> MemoryRequirement:
    found = need(replace(request, batch_size=1), model)
    while (more := need(replace(request, batch_size=found.plan.request.batch_size + 1), model)).fits(limits):
        found = more
    return found


def test_the_ways_are_hift_with_one_a_quarter_and_all_layers_full_both_selections_of_sft_lora_and_dense() -> None:
    ways = {way.title: dict(way.settings) for way in ways_of(tiny_model(), GIVEN)}
    assert ways == {
        "HiFT, all layers": {"method": "hift", "layers_per_group": 5, "steps_per_group": 1, "gradients": "host"},
        "HiFT, 2 of 5 layers": {"method": "hift", "layers_per_group": 2, "steps_per_group": 20},
        "HiFT, 1 of 5 layers": {"method": "hift", "layers_per_group": 1, "steps_per_group": 1},
        "full": {"method": "hift", **ALL_LAYERS, "optimizer": "adafactor"},
        "SFT (AG)": {"method": "sft"},
        "SFT (MA)": {"method": "sft", "selection": "momentum"},
        "QLoRA": {"method": "lora", "load_in_4bit": True},
        "LoRA": {"method": "lora"},
        "dense": {"method": "dense"},
    }


def test_each_way_has_the_precision_of_train_with_bf16_and_what_was_given() -> None:
    given = {"seq_length": 64, "optimizer": "adamw8bit", "gradient_checkpointing": False}
    for way in ways_of(tiny_model(), given):
        if way.settings["method"] == "sft" or way.title == "full":
            continue  # which have an optimizer themselves
        request = way.request(given)
        precisions = {"hift": "mixed_hi", "lora": "bf16", "dense": "mixed"}
        assert request.precision == precisions[request.method]
        assert (request.optimizer, request.gradient_checkpointing) == ("adamw8bit", False)


@pytest.mark.parametrize("master", ["none", "stochastic"])
def test_masters_that_were_given_are_those_of_the_rows_with_masters(master: str) -> None:
    requests = [way.request({"master": master}) for way in ways_of(tiny_model(), {"master": master})]
    assert {(each.method, each.precision, each.master) for each in requests if each.layers_per_group != "all"} == {
        ("hift", "bf16", master), ("sft", "bf16", None), ("lora", "bf16", None), ("dense", "mixed", None)
    }  # fmt: skip


@pytest.mark.parametrize(("title", "blocks"), quick([("HiFT, 2 of 5 layers", 3), ("LoRA", 1)], [("LoRA", 1)]))
def test_a_row_is_what_trying_all_batches_one_at_a_time_finds(title: str, blocks: int) -> None:
    model = tiny_model(num_hidden_layers=blocks)
    given = {"seq_length": 512}  # so that a sequence is most of what is needed
    (way,) = (way for way in ways_of(model, given) if way.title == title)
    limits = Limits(device_bytes=need(replace(way.request(given), batch_size=2), model).device_bytes + 1000)
    rows = rows_of(way, replace(question(limits.device_bytes, model), given=given))
    assert [row.title for row in rows] == [title, f"{title} + TokenTune"]
    for row, token_ratio in zip(rows, (None, 0.3), strict=True):
        expected = largest_by_trying_all(replace(way.request(given), token_ratio=token_ratio), limits, model)
        assert expected.plan.request.batch_size >= 2
        assert row.requirement is not None and row.time is not None
        assert row.requirement.plan.request == expected.plan.request
        assert row.requirement.device_bytes == expected.device_bytes
        assert row.requirement.host_bytes == expected.host_bytes
        run = with_room_ahead(expected, limits.device_bytes)
        assert row.time.seconds == plan_time(run, CARD.rates(efficiency=0.6)).seconds


def test_what_does_not_fit_is_a_row_with_one_sequence_and_no_time() -> None:
    way = Way(title="dense", settings={"method": "dense"}, trains_all=True)
    row, _ = rows_of(way, question(MIB))
    assert row.time is None and row.speed == 0
    assert row.requirement is not None and row.requirement.plan.request.batch_size == 1
    assert describe_row(row).endswith("with one sequence, which does not fit")


def test_what_cannot_be_planned_is_a_row_with_its_reason() -> None:
    way = Way(title="HiFT, 9 layers", settings={"method": "hift", "layers_per_group": 9}, trains_all=True)
    (row,) = rows_of(way, question(MIB))
    assert row.requirement is None and row.reason is not None
    assert "layers_per_group=9 must be in [1, 3]" in row.reason
    assert "can't be planned: layers_per_group=9" in describe_row(row)
    assert row.to_json()["reason"] == row.reason


def made(title: str, seconds: float | None, *, trains_all: bool, size: int = 1, ratio: float | None = None) -> Row:
    """A row that needs so many GiB and takes so long for 512 tokens."""
    request = paper_request(token_ratio=ratio)
    requirement = add_allowance(simple_plan(request, moment(parameters=size * 1024 * MIB)))
    rates = CARD.rates()
    time = (
        None
        if seconds is None
        else PlannedTime(
            rates=rates,
            update=MeanUpdate(computing={"forward": seconds}, waiting={}),
            seconds_range=(seconds, seconds),
            num_tokens=512,
            weight_share=1.0,
            flops=1.0,
            num_operators=1.0,
            disk_bytes_per_update=0.0,
        )
    )
    way = Way(title=title, settings={"method": "hift"}, trains_all=trains_all)
    return Row(way=way, requirement=requirement, time=time)


HIFT = made("HiFT", 2.0, trains_all=True)
HIFT_SHARE = made("HiFT", 1.0, trains_all=True, ratio=0.3)
LORA = made("LoRA", 0.5, trains_all=False)
DENSE = made("dense", None, trains_all=True, size=60)
REFUSED = Row(
    way=Way(title="SFT", settings={"method": "sft"}, trains_all=False), requirement=None, time=None, reason="no"
)


def test_the_fastest_come_first_then_what_does_not_fit_then_what_cannot_be_planned() -> None:
    assert in_order([REFUSED, DENSE, HIFT, LORA, HIFT_SHARE]) == [LORA, HIFT_SHARE, HIFT, DENSE, REFUSED]


def test_the_advice_is_what_trains_each_weight_on_the_most_tokens_and_what_reads_more() -> None:
    assert advice([LORA, HIFT, HIFT_SHARE]) == (
        "use HiFT: it trains all weights on all tokens, and each weight on the most tokens/s, 256; LoRA reads 4.0 x as "
        "many, and trains 0.0% as many values"
    )
    assert advice([HIFT, HIFT_SHARE]).endswith(
        "HiFT + TokenTune reads 2.0 x as many, and trains all weights, on 30% of the tokens"
    )
    assert advice([HIFT, DENSE]).endswith("256, and nothing reads more")
    assert advice([LORA, DENSE]).startswith("use LoRA, the fastest that fits: nothing that trains all weights fits")
    assert advice([DENSE, REFUSED]).startswith("nothing fits")


def test_one_group_of_many_is_not_taken_for_reading_tokens_faster() -> None:
    assert HIFT.requirement is not None and HIFT_SHARE.time is not None
    groups = (replace(HIFT.requirement.plan.groups[0], indices=tuple(range(34))),)
    plan = replace(HIFT.requirement.plan, groups=groups)
    assert (HIFT.requirement.plan.num_groups, plan.num_groups) == (1, 34)
    requirement, time = replace(HIFT.requirement, plan=plan), replace(HIFT_SHARE.time, weight_share=1 / plan.num_groups)
    in_groups = replace(HIFT_SHARE, requirement=requirement, time=time)
    assert (in_groups.speed, in_groups.weight_speed) == (512, 512 / 34)
    whole = replace(HIFT, way=replace(HIFT.way, title="HiFT, all layers"))
    assert advice([in_groups, whole]) == (
        "use HiFT, all layers: it trains all weights on all tokens, and each weight on the most tokens/s, 256; HiFT "
        "reads 2.0 x as many, and trains all weights, each in one of 34 updates"
    )


def comparison() -> Comparison:
    return Comparison(question=question(24 * 1024 * MIB), rows=in_order([HIFT, LORA, DENSE, REFUSED]))


def table_of(rows: list[Row], num_tokens: float | None) -> list[str]:
    console = Console(width=100, record=True, highlight=False)
    with console.capture() as captured:
        print_comparison(Comparison(question=question(24 * 1024 * MIB), rows=rows), num_tokens, console)
    return [line.strip() for line in captured.get().splitlines()]


@pytest.mark.parametrize(("num_tokens", "time"), [(None, "500 ms"), (1e9, "271.3")])
def test_the_table_has_a_row_for_each_way(num_tokens: float | None, time: str) -> None:
    rows = in_order([HIFT, LORA, DENSE, REFUSED, HIFT_SHARE])
    lines = table_of(rows, num_tokens)
    words = {line.split()[0]: line.split() for line in lines[:-4] if line.split()}
    assert words["dense"][-2:] == ["no", "fit"] and words["SFT"][-2:] == ["no", "plan"]
    assert words["LoRA"][-2:] == ["1,024", "1,024"] and time in " ".join(words["LoRA"])
    shares = [line.split()[1] for line in lines if line.startswith("HiFT")]
    assert shares == ["30%", "all"]
    assert lines[-1] == advice(rows)


def test_the_rows_of_a_large_model_fit_100_columns() -> None:
    assert HIFT.requirement is not None and HIFT.time is not None
    plan = replace(HIFT.requirement.plan, num_parameters=70_000_000_000, num_trainable_peak=17_100_000_000)
    large = replace(
        HIFT,
        way=replace(HIFT.way, title="HiFT, 21 of 82 layers"),
        requirement=replace(HIFT.requirement, plan=replace(plan, host_bytes=1_100 * 2**30)),
        time=replace(HIFT.time, update=MeanUpdate(computing={"forward": 0.0123}, waiting={})),
    )
    (line,) = (line for line in table_of([large], None) if line.startswith("HiFT"))
    assert line.split()[-3:] == ["ms", "41,626", "41,626"], "nothing is cut or wrapped"
    assert " all, 17.1B/step " in line and " 1,100.0 " in line


def test_what_is_trained_is_said_as_a_number_and_a_share() -> None:
    assert HIFT.requirement is not None
    plan = replace(HIFT.requirement.plan, num_parameters=8_030_000_000, num_trainable_peak=218_000_000)
    row = replace(HIFT, requirement=replace(HIFT.requirement, plan=plan))
    assert describe_trained(row) == "all, 218M/step"
    assert describe_trained(
        replace(row, requirement=replace(HIFT.requirement, plan=replace(plan, num_parameters=7)))
    ) == ("all")
    assert describe_trained(replace(row, way=LORA.way)) == "218M, 2.7%"


def test_it_is_drawn_as_memory_and_speed_of_each_row(tmp_path: Path) -> None:
    figure: Any = comparison_figure(comparison())
    memory, speed = figure.axes
    assert [label.get_text() for label in memory.get_yticklabels()] == [
        "LoRA, batch 1",
        "HiFT, batch 1",
        "dense, batch 1",
    ]
    assert [bar.get_width() for bar in speed.containers[0]] == [1024, 256, 0]
    assert [text.get_text() for text in speed.texts] == ["1,024", "256", "does not fit"]
    assert "planned" in figure.get_suptitle()
    save(comparison_figure(comparison()), tmp_path / "ways.png")
    assert (tmp_path / "ways.png").read_bytes()[:4] == b"\x89PNG"


def test_a_bar_beyond_twice_the_limit_is_cut_broken_and_has_its_number() -> None:
    figure: Any = comparison_figure(comparison())
    memory, limit = figure.axes[0], CARD.memory_bytes / (1024 * MIB)
    lora, _, dense = ([bars[place] for bars in memory.containers] for place in range(3))
    assert max(bar.get_x() + bar.get_width() for bar in dense) == 2 * limit < memory.get_xlim()[1]
    breaks = [line for line in memory.lines if line.get_color() == "white"]
    assert len(breaks) == 2 and all(limit < x < 2 * limit for line in breaks for x in line.get_xdata())
    assert DENSE.requirement is not None and LORA.requirement is not None
    assert [text.get_text() for text in memory.texts] == [f"{DENSE.requirement.device_bytes / (1024 * MIB):.1f} GiB"]
    assert sum(bar.get_width() for bar in lora) == pytest.approx(LORA.requirement.device_bytes / (1024 * MIB))
    memory, _ = comparison_figure(replace(comparison(), rows=[LORA, HIFT])).axes
    assert memory.get_xlim()[1] > limit and list(memory.texts) == []


@pytest.mark.parametrize("where", ["a thread", pytest.param("processes", marks=pytest.mark.slow)])
def test_side_by_side_the_rows_are_the_same(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own import all anew, so that most runs take a thread in their place."""
    if where == "a thread":
        pool = ThreadPoolExecutor(1)
        monkeypatch.setattr("slivertune.planning.compare.ProcessPoolExecutor", lambda *_, **__: pool)
    ways = [way for way in ways_of(SMALLEST, GIVEN) if way.title in ("LoRA", "dense")]
    monkeypatch.setattr("slivertune.planning.compare.ways_of", lambda *_: ways)
    (lora,) = (way for way in ways if way.title == "LoRA")
    asked = question(need(lora.request({**GIVEN, "batch_size": 1})).device_bytes + 1000)  # too few for dense

    def rows(num_processes: int) -> list[dict[str, Any]]:
        of_ways = compare(asked, num_processes=num_processes)
        return [row.to_json() for row in in_order([row for rows in of_ways for row in rows])]

    assert rows(2) == rows(1)


def test_the_command_prints_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slivertune.planning.command.compare", lambda _: iter([[HIFT, LORA]]))
    monkeypatch.setattr("slivertune.planning.command.ways_of", lambda *_: [HIFT.way])
    run_plan(["--model", str(write_config(tmp_path)), "--compare", "--gpu", "4090", "--json"])
    printed, told = capsys.readouterr()
    values = json.loads(printed)
    assert values["advice"] == advice([HIFT, LORA])
    assert [row["title"] for row in values["rows"]] == ["LoRA", "HiFT"]
    assert values["rows"][0]["time"]["tokens_per_second"] == 1024
    assert (values["gpu"], values["fit"]["limit_bytes"]) == (CARD.name, CARD.memory_bytes)
    assert "1 of 1: HiFT: batch_size 1" in told


@pytest.mark.parametrize("is_json", [True, False])
def test_after_ctrl_c_the_ways_that_are_ready_are_printed(
    is_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Question) -> Iterator[list[Row]]:
        yield [HIFT, LORA]
        raise KeyboardInterrupt

    monkeypatch.setattr("slivertune.planning.command.compare", interrupted)
    words = ["--model", str(write_config(tmp_path)), "--compare", "--gpu", "4090", *(["--json"] if is_json else [])]
    with pytest.raises(KeyboardInterrupt):
        run_plan(words)
    printed = capsys.readouterr().out
    if is_json:
        values = json.loads(printed)
        assert (values["num_missing"], [row["title"] for row in values["rows"]]) == (8, ["LoRA", "HiFT"])
    else:
        assert (
            "interrupted: 8 more ways were not planned\n" in printed
            and f"of the ways that were planned before Ctrl-C: {advice([HIFT, LORA])}" in printed
        )
    monkeypatch.setattr("slivertune.planning.command.compare", lambda _: _raise_interrupt())
    with pytest.raises(KeyboardInterrupt):
        run_plan(words)
    assert not capsys.readouterr().out, "nothing was ready"


def _raise_interrupt() -> Iterator[list[Row]]:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "hift"], "--method hift is set by each row of --compare"),
        (["--batch_size", "4"], "--batch_size 4 is set by each row of --compare"),
        (["--sweep", "seq_length=1,2"], "--compare is one question, and --sweep another"),
        (["--max", "seq_length"], "--compare is one question, and --max another"),
        (["--recipe", "peft-kbit"], "--recipe peft-kbit plans a script of another library"),
        (["--layers_per_group", "auto"], "--compare is one question, and --layers_per_group auto another"),
        (["--bf16"], "--bf16 true means another precision for each method"),
    ],
)
def test_what_a_row_decides_is_not_given(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run_plan(["--model", str(write_config(tmp_path)), "--compare", "--gpu", "4090", *words])


def test_without_a_card_it_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--gpu"):
        run_plan(["--model", str(write_config(tmp_path)), "--compare"])


def test_methods_are_swept_like_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_config(tmp_path, num_hidden_layers=1))
    run_plan(["--model", model, "--seq_length", "64", "--sweep", "method=hift,lora", "--json"])
    points = json.loads(capsys.readouterr().out)["sweep"]
    for point, method in zip(points, ("hift", "lora"), strict=True):
        alone = make_plan(replace(PlanRequest(**GIVEN), method=method), SMALLEST.config)
        assert (point["method"], point["peak_bytes"]) == (method, alone.peak_bytes)
