"""The figures of the presets: each fits its card, and what is written of it is what is planned.

Every preset names the `slivertune plan` command that prints its peak; that command is read and planned here, as it is.
"""

import functools
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from slivertune.core import presets
from slivertune.planning import make
from slivertune.planning.arguments import PlanArguments
from slivertune.planning.configs import find_model
from slivertune.planning.make import make_plan
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.request import PlanRequest
from slivertune.training.command_line.plan_words import parse_plan_arguments

pytestmark = pytest.mark.slow

GIB = 2**30
STEMS = [name.removesuffix(".yaml") for name in presets.preset_names() if name.endswith(".yaml")]
RUN_FILES = [name.removesuffix(".yaml") for name in presets.run_file_names()]
LAUNCH_PRESETS = [stem for stem in STEMS if stem not in RUN_FILES]
LAYOUTS = {"NO": {"single"}, "MULTI_GPU": {"ddp"}, "FSDP": {"fsdp2"}, "DEEPSPEED": {"zero1", "zero2", "zero3"}}
"""What runs under a preset, by accelerate's name of the engine."""


def table() -> dict[str, dict[str, str]]:
    """The table of the presets, by preset and column."""
    text = (presets.preset_path("zero2").parent / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    header, _, *body = rows
    return {row[0].strip("`"): dict(zip(header, row, strict=True)) for row in body}


def comment_of(stem: str) -> str:
    """What a preset opens with, in one line."""
    comment = re.match(r"(?:#.*\n)+", presets.preset_path(stem).read_text(encoding="utf-8"))
    assert comment is not None
    return re.sub(r"\s*\n#\s*", " ", comment[0])


def arguments_of(stem: str) -> PlanArguments:
    """The command that a preset names."""
    command = re.search(r"slivertune plan (.+?) prints it", comment_of(stem))
    assert command is not None, stem
    return parse_plan_arguments(shlex.split(command[1]))


@pytest.fixture(scope="module")
def requirement() -> Any:
    """What the command of a preset needs. Presets that differ in their GPUs alone share the step that is run."""
    steps: dict[str, Any] = {}
    run_step = make._plan_of_one

    def step_once(request: PlanRequest, config: Any, shared: PlanRequest, *more: Any) -> Any:
        # FSDP2's units depend on the GPUs; the engines of the other layouts do not show in the step by their number.
        key = repr((request, config.to_dict(), shared if shared.layout == "fsdp2" else shared.layout, more))
        if key not in steps:
            steps[key] = run_step(request, config, shared, *more)
        return steps[key]

    @functools.cache
    def requirement_by_stem(stem: str) -> MemoryRequirement:
        arguments = arguments_of(stem)
        return add_allowance(make_plan(PlanRequest(**arguments.given), find_model(arguments.model).config))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "_plan_of_one", step_once)
        yield requirement_by_stem


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


@pytest.mark.parametrize("stem", STEMS)
def test_a_preset_fits_its_card_with_its_allowance(stem: str, requirement: Callable[[str], MemoryRequirement]) -> None:
    found = requirement(stem)
    card = re.search(r"_(\d+)g(_|$)", stem)
    assert found.device_bytes > found.plan.peak_bytes
    assert found.fits(Limits(device_bytes=(int(card[1]) if card else 24) * GIB))


@pytest.mark.parametrize("stem", STEMS)
def test_the_figures_in_the_table_and_in_the_preset_are_those_of_the_plan(
    stem: str, requirement: Callable[[str], MemoryRequirement]
) -> None:
    found = requirement(stem)
    planned = (in_gib(found.plan.peak_bytes), in_gib(found.device_bytes))
    cell = re.match(r"([\d.]+) GiB, needs ([\d.]+)", table()[stem]["GPU memory planned"])
    head = re.search(r"Planned peak: ([\d.]+) GiB, ([\d.]+) with its allowance, at 1 x (\d+) tokens", comment_of(stem))
    assert cell is not None and head is not None
    assert cell.groups() == planned
    assert head.groups() == (*planned, str(found.plan.request.seq_length))


@pytest.mark.parametrize("stem", RUN_FILES)
def test_what_a_run_file_says_of_host_and_disk_is_what_is_planned(
    stem: str, requirement: Callable[[str], MemoryRequirement]
) -> None:
    found, text = requirement(stem), comment_of(stem)
    host = re.search(r"(?:a host with|the run takes) ([\d.]+) GiB", text.replace("with nothing", "a host with 0.0 GiB"))
    disk = re.search(r"([\d.]+) GiB on a fast local disk", text)
    assert host is not None and host[1] == in_gib(found.host_bytes)
    assert (disk[1] if disk else "0.0") == in_gib(found.disk_bytes)
    loading = re.search(r"whole bf16 model there first: (\d+) GiB", text)
    if loading is not None:
        assert int(loading[1]) == round(2 * found.plan.num_parameters / GIB)


@pytest.mark.parametrize("stem", RUN_FILES)
def test_what_is_planned_is_what_a_run_file_says(stem: str) -> None:
    """The command's options are the file's keys, without those that change no memory."""
    arguments = arguments_of(stem)
    settings = yaml.safe_load(presets.preset_path(stem).read_text(encoding="utf-8"))
    options = [
        word
        for name, value in settings.items()
        if name != "state_dir"
        for word in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]
    asked = PlanRequest(**parse_plan_arguments(["--model", arguments.model, *options]).given)
    assert PlanRequest(**arguments.given) == asked
    size = re.match(r"\d+B", table()[stem]["Model and hardware"])
    assert size is not None and arguments.model.endswith(size[0].lower())


@pytest.mark.parametrize("stem", LAUNCH_PRESETS)
def test_what_is_planned_is_what_the_preset_runs(stem: str) -> None:
    """The command's layout, GPUs and offload are the preset's own, its model and checkpointing those of the table."""
    arguments = arguments_of(stem)
    request = PlanRequest(**arguments.given)
    settings = yaml.safe_load(presets.preset_path(stem).read_text(encoding="utf-8"))
    assert request.layout in LAYOUTS[settings["distributed_type"]]
    assert request.num_gpus == settings["num_processes"]
    engine = settings.get("deepspeed_config") or settings.get("fsdp_config") or {}
    if settings["distributed_type"] == "DEEPSPEED":
        assert request.layout == f"zero{engine['zero_stage']}"
    assert request.offload_parameters == (
        engine.get("offload_param_device", "none") != "none" or engine.get("fsdp_offload_params", False)
    )
    row = table()[stem]
    size = re.match(r"\d+B", row["Model and hardware"])
    assert size is not None and arguments.model.endswith(size[0].lower())
    assert request.gradient_checkpointing == ("checkpointed" in row["GPU memory planned"])
    assert (request.precision, request.method) == ("mixed_hi", "hift")
    assert (request.batch_size, request.seq_length) == (1, 512)


def test_the_table_has_a_row_for_each_preset_and_no_other() -> None:
    assert sorted(table()) == sorted(STEMS)
    assert "13B" in table()["single_gpu_24g_13b"]["Model and hardware"]
