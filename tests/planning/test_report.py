import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from slivertune.planning.answer import Answer, SweepAnswer
from slivertune.planning.candidates import all_candidates
from slivertune.planning.cards import card_named
from slivertune.planning.largest import Largest
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.report import describe_request, print_answer, print_sweep
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import Found, Step, search
from tests.helpers.plan_requests import paper_request
from tests.planning.made import GIB, group, moment, plan, simple_plan, tiny_model

MIB = 2**20
BASE = "optimizer adamw, precision fp32, batch_size 8, seq_length 1024"
REQUEST = paper_request(precision="mixed_hi", gradient_checkpointing=True)
EMBEDDING = group(0, "embedding", moment(0, "step", parameters=12 * GIB, state=300 * MIB))
BLOCKS = group(
    1,
    "model.layers.0",
    moment(1, parameters=12 * GIB, gradients=386 * MIB, state=192 * MIB, residual=3 * GIB),
    num_alike=32,
    num_parameters=202_383_360,
)
REQUIREMENT = add_allowance(plan(REQUEST, EMBEDDING, BLOCKS, host_bytes=75 * GIB, notes=("a [odd] note",)))


def text_of(answer: Answer | SweepAnswer, width: int = 160) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    if isinstance(answer, SweepAnswer):
        print_sweep(answer, console)
    else:
        print_answer(answer, console)
    return out.getvalue()


def row_of(text: str, title: str) -> list[str]:
    """The cells of a table's row."""
    (line,) = [line for line in text.splitlines() if re.match(rf"│ +{re.escape(title)} ", line)]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_the_parts_of_the_peak_the_allowance_and_the_groups_each_have_a_line() -> None:
    text = text_of(Answer(model=tiny_model(), requirement=REQUIREMENT))
    for title, size in (
        ("weights", "12.00 GiB"),
        ("gradients", "386.0 MiB"),
        ("masters and optimizer state", "192.0 MiB"),
        ("activations and other", "3.00 GiB"),
        ("fragmentation", f"{REQUIREMENT.allowance.fragmentation / MIB:.1f} MiB"),
        ("offloaded to host memory", "75.00 GiB"),
    ):
        assert row_of(text, title)[1] == size
    assert row_of(text, "peak")[1:] == ["15.56 GiB", "in the backward, while model.layers.0 or one of 31 alike trains"]
    assert row_of(text, "CUDA context and kernels")[1:] == ["512.0 MiB", "allowance, not planned"]
    assert row_of(text, "cuBLAS workspaces")[1:] == ["64.00 MiB", "allowance"]
    assert row_of(text, "GPU memory needed")[1:] == [f"{REQUIREMENT.device_bytes / GIB:.2f} GiB", ""]
    assert row_of(text, "model.layers.0 or one of 31 alike")[1:] == [
        "202,383,360", "11 B", "17 B", "13 B", "15.56 GiB", "backward",
    ]  # fmt: skip
    assert row_of(text, "embedding")[-1] == "update"
    assert "NCCL" not in text
    for part in (
        "hift on tiny: 1,234,567 parameters, from a test",
        "33 groups, one per update",
        "note: a [odd] note",
        "to run it: slivertune train --model_name_or_path owner/tiny",
        "--fit 24GiB finds settings",
    ):
        assert part in text


def test_a_limit_has_its_verdict() -> None:
    text = text_of(Answer(model=tiny_model(), requirement=REQUIREMENT, limits=Limits(device_bytes=24 * GIB)))
    spare = (24 * GIB - REQUIREMENT.device_bytes) / GIB
    assert row_of(text, "GPU memory needed")[2] == f"fits 24.00 GiB, {spare:.2f} GiB to spare"
    assert "--fit 24GiB finds" not in text
    assert row_of(text, "offloaded to host memory")[2] == ""
    assert "\nwarning: needs 75.00 GiB of host memory, and no limit was given. Give one by --fit_host 64GiB\n" in text
    text = text_of(Answer(model=tiny_model(), requirement=REQUIREMENT, limits=Limits(device_bytes=10 * GIB)))
    assert row_of(text, "GPU memory needed")[2] == f"{REQUIREMENT.device_bytes / GIB - 10:.2f} GiB more than 10.00 GiB"


@pytest.mark.parametrize(
    ("spare", "settings", "more", "options"),
    [
        (4 * GIB, {"method": "hift"}, {"card": card_named("4090")}, ["--max batch_size", "--layers_per_group auto"]),
        (4 * GIB, {"method": "hift"}, {}, ["--max batch_size"]),
        (4 * GIB, {"method": "hift", "state": "device"}, {"card": card_named("4090")}, ["--max batch_size"]),
        (4 * GIB, {"method": "lora"}, {}, ["--max batch_size"]),
        (4 * GIB, {"method": "lora"}, {"largest": "found"}, []),
        (4 * GIB, {"method": "lora"}, {"found": "changed"}, []),
        (GIB, {"method": "lora"}, {}, []),
        (-GIB, {"method": "lora"}, {}, []),
    ],
)
def test_much_memory_that_stays_free_has_the_options_that_fill_it(
    spare: int, settings: dict[str, Any], more: dict[str, Any], options: list[str]
) -> None:
    requirement = add_allowance(simple_plan(paper_request(**settings), moment(parameters=15 * GIB)))
    limits = Limits(device_bytes=requirement.device_bytes + spare)
    step = Step(title="A batch of 1", cost="none", changes={"batch_size": (2, 1)})
    found = Found(start=requirement, requirement=requirement, steps=(step,), skipped=(), num_plans=2)
    largest = Largest(
        field="batch_size",
        value=2,
        requirement=requirement,
        next_value=None,
        next_device_bytes=None,
        limits=limits,
    )
    values = {"found": found, "largest": largest}
    more = {name: values.get(name, value) for name, value in more.items()}
    text = text_of(Answer(model=tiny_model(), requirement=requirement, limits=limits, **more))
    assert ["--max batch_size"] * ("4.00 GiB stay free. " in text) == options[:1]
    assert [each for each in ("--max batch_size", "--layers_per_group auto") if each in text] == options


def test_tables_keep_to_a_hundred_columns_and_cut_no_name_and_no_number_off() -> None:
    text = text_of(Answer(model=tiny_model(), requirement=REQUIREMENT), width=100)
    wide = text_of(Answer(model=tiny_model(), requirement=REQUIREMENT))
    tables = [line for line in text.splitlines() if line[:1] in "┌├└│┏┡┃"]
    assert tables and max(map(len, tables)) == 100 and "…" not in text
    cells = [cell.strip() for line in wide.splitlines() if "│" in line for cell in line.strip("│").split("│")]
    assert all(cell in text for cell in cells if cell.endswith(("iB", "B")) or cell.replace(",", "").isdigit())


def test_what_waits_has_a_verdict_where_there_is_a_limit() -> None:
    limits = Limits(device_bytes=24 * GIB, host_bytes=64 * GIB)
    text = text_of(Answer(model=tiny_model(), requirement=REQUIREMENT, limits=limits))
    assert row_of(text, "offloaded to host memory")[2] == "11.00 GiB more than 64.00 GiB"
    assert "warning" not in text
    on_disk = add_allowance(plan(REQUEST, BLOCKS, disk_bytes=75 * GIB))
    limits = Limits(device_bytes=24 * GIB, disk_bytes=100 * GIB, assumed=frozenset({"disk_bytes"}))
    text = text_of(Answer(model=tiny_model(), requirement=on_disk, limits=limits))
    verdict = "fits 100.0 GiB that this machine has free, 25.00 GiB to spare"
    assert row_of(text, "offloaded to disk")[2] == verdict
    assert "warning" not in text


def test_a_run_without_groups_has_no_table_of_them_and_one_on_several_gpus_has_nccl() -> None:
    text = text_of(
        Answer(
            model=tiny_model(),
            requirement=add_allowance(
                simple_plan(paper_request(method="dense", layout="ddp", num_gpus=2), moment(parameters=GIB))
            ),
        )
    )
    assert "groups" not in text and "to run it" not in text
    assert row_of(text, "NCCL buffers")[1] == "256.0 MiB"
    assert row_of(text, "peak")[2] == "in the backward"
    assert "note: start it by accelerate launch --config_file $(slivertune path ddp) --num_processes 2" in text


def test_kinds_of_updates_that_are_no_groups_are_called_so() -> None:
    inside = group(0, "inside an estimation phase", moment(0, parameters=GIB, state=MIB))
    text = text_of(
        Answer(
            model=tiny_model(),
            requirement=add_allowance(
                plan(
                    paper_request(method="sft"),
                    inside,
                    group(1, "outside of estimation phases", moment(1, parameters=GIB)),
                )
            ),
        )
    )
    assert "2 kinds of updates" in text and "groups, one per update" not in text
    assert row_of(text, "peak")[2] == "in the backward, inside an estimation phase"


def found_by_search() -> Found:
    def memory_of(request: PlanRequest) -> MemoryRequirement:
        activations = request.batch_size * (GIB // 8 if request.gradient_checkpointing else GIB)
        return add_allowance(simple_plan(request, moment(parameters=GIB, residual=activations), host_bytes=9 * GIB))

    return search(
        paper_request(batch_size=8),
        all_candidates(),
        Limits(device_bytes=3 * GIB, host_bytes=10 * GIB),
        memory_of,
        fixed=("optimizer",),
    )


def test_what_was_chosen_comes_with_its_gain_and_cost_and_what_was_left_with_its_reason() -> None:
    found = found_by_search()
    limits = Limits(device_bytes=3 * GIB)
    text = text_of(Answer(model=tiny_model(), requirement=found.requirement, limits=limits, found=found))
    before, after = found.start.device_bytes / GIB, found.requirement.device_bytes / GIB
    assert f"\n{before:.2f} GiB needed as asked, {after:.2f} GiB as chosen:\n" in text
    (chosen,) = [line for line in text.splitlines() if line.startswith("  chose")]
    assert chosen.startswith("  chose  gradient checkpointing (gradient_checkpointing false -> true). Cost: the same")
    assert "  skipped 8-bit optimizer state: --optimizer was set" in text


def test_a_run_that_fits_as_asked_says_so() -> None:
    found = Found(start=REQUIREMENT, requirement=REQUIREMENT, steps=(), skipped=(), num_plans=1)
    assert f"{REQUIREMENT.device_bytes / GIB:.2f} GiB needed as asked, which fits without any change" in text_of(
        Answer(model=tiny_model(), requirement=REQUIREMENT, limits=Limits(device_bytes=24 * GIB), found=found)
    )


def test_the_json_has_the_plan_the_allowance_the_command_and_the_search() -> None:
    found = found_by_search()
    limits = Limits(device_bytes=3 * GIB, host_bytes=10 * GIB)
    values = json.loads(
        json.dumps(Answer(model=tiny_model(), requirement=found.requirement, limits=limits, found=found).to_json())
    )
    promised = {
        "peak_bytes", "parameter_bytes", "gradient_bytes", "state_bytes", "residual_bytes", "host_bytes",
        "num_parameters", "num_trainable_peak", "groups", "peak",
    }  # fmt: skip
    assert promised <= values.keys()
    assert values["peak_bytes"] == values["peak"]["total_bytes"] == found.requirement.plan.peak_bytes
    assert values["need_bytes"] == values["peak_bytes"] + values["allowance"]["total_bytes"]
    assert values["model"] == "tiny"
    assert values["command"].startswith("slivertune train --model_name_or_path owner/tiny --dataset")
    fit = values["fit"]
    names = ("limit_bytes", "host_limit_bytes", "disk_limit_bytes", "num_plans", "host_bytes_as_asked")
    assert [fit[name] for name in names] == [3 * GIB, 10 * GIB, None, found.num_plans, 9 * GIB]
    assert [fit[name] for name in ("fits", "fits_device", "fits_host", "fits_disk")] == [True, True, True, None]
    assert (fit["assumed"], fit["warnings"]) == ([], [])
    assert [step["changes"] for step in fit["steps"]] == [{"gradient_checkpointing": {"from": False, "to": True}}]
    assert fit["need_bytes_as_asked"] > limits.device_bytes >= values["need_bytes"]
    assert {"title": "8-bit optimizer state", "reason": "--optimizer was set"} in fit["skipped"]


def sweep() -> SweepAnswer:
    requirements = tuple(
        (
            length,
            add_allowance(simple_plan(paper_request(seq_length=length), moment(parameters=GIB, residual=length * MIB))),
        )
        for length in (512, 2048)
    )
    return SweepAnswer(
        model=tiny_model(),
        field="seq_length",
        requirements=requirements,
        limits=Limits(device_bytes=2 * GIB + GIB // 4),
        times=(None, None),
    )


def test_a_sweep_has_a_row_a_value_in_one_unit_and_says_what_fits() -> None:
    text = text_of(sweep())
    assert "on one GPU, in GiB" in text
    assert row_of(text, "512")[:6] == ["512", "1.00", "0.00", "0.00", "0.50", "1.50"]
    assert row_of(text, "512")[-1] == "yes"
    assert row_of(text, "2048")[4] == "2.00" and row_of(text, "2048")[-1] == "no"
    assert "seq_length 512" not in text, "what is swept is not among the settings"


def test_the_json_of_a_sweep_is_one_object_with_a_plan_a_value() -> None:
    values = json.loads(json.dumps(sweep().to_json()))
    points, names = values["sweep"], ("seq_length", "fits", "residual_bytes")
    assert values["field"] == "seq_length"
    assert [[point[name] for name in names] for point in points] == [[512, True, 2**29], [2048, False, 2**31]]
    assert all("allowance" in point and "groups" in point for point in points)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, BASE),
        (
            {"stream_bytes": 2**25, "chunked_cross_entropy": False, "lora_rank": 3},
            f"{BASE}, no chunked_cross_entropy, stream_bytes 32.00 MiB",
        ),
        (
            {"method": "lora", "lora_rank": 3, "layers_per_group": 4, "load_in_4bit": True},
            f"{BASE}, lora_rank 3, load_in_4bit",
        ),
    ],
)
def test_settings_are_told_where_they_differ_from_the_default_and_the_method_reads_them(
    changes: dict[str, Any], line: str
) -> None:
    assert describe_request(PlanRequest(**changes)) == line
