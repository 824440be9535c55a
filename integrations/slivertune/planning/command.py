"""`slivertune plan`: find the model, plan the run, print the result."""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from slivertune.core.byte_text import format_bytes
from slivertune.core.masking import masked
from slivertune.core.positions import usable_positions
from slivertune.planning.answer import Answer, SweepAnswer
from slivertune.planning.arguments import PlanArguments, Sweep
from slivertune.planning.candidates import all_candidates
from slivertune.planning.cards import DISK_BANDWIDTH, EFFICIENCY, Card, card_here, card_named, find_card
from slivertune.planning.compare import Comparison, Question, Row, compare, in_order, ways_of
from slivertune.planning.comparison_plot import comparison_figure
from slivertune.planning.comparison_report import describe_row, print_comparison
from slivertune.planning.configs import ModelFigures, find_model
from slivertune.planning.largest import LargestField, find_largest
from slivertune.planning.layers_per_group import check_has_copies, choose_layers_per_group
from slivertune.planning.limits import limits_of, trains_here
from slivertune.planning.make import Planner
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.planned_time import PlannedTime, plan_time, with_room_ahead
from slivertune.planning.plot import draw, require_matplotlib, save
from slivertune.planning.progress import PlanProgress, showing_progress
from slivertune.planning.quiet import quiet_libraries
from slivertune.planning.report import line_printer, print_answer, print_sweep
from slivertune.planning.request import REQUEST_OPTIONS, PlanRequest, precision_in_16_bits
from slivertune.planning.search import Estimator, Found, Tell, search, start_of_search

_WIDTH_WITHOUT_TERMINAL = 100
_DEFAULT = {name: option.default for name, option in REQUEST_OPTIONS.items()}


def run_plan(arguments: PlanArguments) -> None:
    """Run `slivertune plan`.

    Args:
        arguments: The settings of the run, and the questions.

    Raises:
        ValueError: If the run can't be planned, or nothing fits.
        ImportError: If a required library is not installed; the message names it.
        KeyboardInterrupt: After Ctrl-C. The rows that were ready are printed.
    """
    if arguments.plot is not None:
        require_matplotlib()
    answer = _answer(arguments)
    _print(answer, arguments)
    if arguments.unread:
        _console(stderr=True).print(f"not read: {', '.join(arguments.unread)}", markup=False, soft_wrap=True)
    if not isinstance(answer, Answer) and answer.num_missing:
        raise KeyboardInterrupt


def _print(answer: Answer | SweepAnswer | Comparison, arguments: PlanArguments) -> None:
    if arguments.plot is not None:
        if isinstance(answer, Comparison):
            save(comparison_figure(answer), arguments.plot)
        else:
            draw(answer, arguments.plot)
    if arguments.json:
        print(json.dumps(masked(answer.to_json()), indent=2))
        return
    console = _console(stderr=False)
    if (defaults := _describe_defaults(arguments, answer)) is not None:
        line_printer(console)(defaults)
    if isinstance(answer, Comparison):
        print_comparison(answer, arguments.all_tokens, console)
    elif isinstance(answer, SweepAnswer):
        print_sweep(answer, console)
    else:
        print_answer(answer, console)
    if arguments.plot is not None:
        console.print(f"drew {arguments.plot}", markup=False, soft_wrap=True)


def _answer(arguments: PlanArguments) -> Answer | SweepAnswer | Comparison:
    console = _console(stderr=True)
    # A plan makes many objects, and full collections would look through those of all libraries as well. Done once: a
    # second plan of this process would keep the models of the first.
    if not gc.get_freeze_count():
        gc.freeze()
    with quiet_libraries(), showing_progress(console) as progress:
        model = find_model(arguments.model)
        given = _settings(arguments, model)
        # Refuse unknown names before anything is planned.
        card = card_here() if arguments.gpu is None else card_named(arguments.gpu)
        if arguments.fits_card or arguments.chooses_layers or arguments.compare or arguments.num_tokens is not None:
            card = find_card(arguments.gpu)
        _check_card_is_asked(arguments, card)
        tell = line_printer(console)
        limits = _limits(arguments, card, given.get("num_gpus", 1))
        if arguments.compare:
            assert card is not None and limits is not None
            return _compare(arguments, given, card, limits, model, tell, progress)
        if arguments.sweep is not None:
            requirements = _sweep(model, arguments, arguments.sweep, tell, progress)
            times = tuple(_time(arguments, card, requirement, limits) for _, requirement in requirements)
            return SweepAnswer(
                model=model,
                field=arguments.sweep.field,
                requirements=requirements,
                limits=limits,
                card=card,
                times=times,
                num_missing=len(arguments.sweep.values) - len(requirements),
            )
        if arguments.chooses_layers:
            assert card is not None and limits is not None
            answer = _chosen(arguments, given, card, limits, model, tell)
        elif arguments.largest is not None:
            answer = _largest(arguments.largest, given, card, limits, model, tell)
        elif arguments.has_limit:
            assert limits is not None
            found = _search(arguments, given, limits, model, tell)
            answer = Answer(model=model, requirement=found.requirement, limits=limits, found=found)
        else:
            answer = Answer(model=model, requirement=_estimator(model)(PlanRequest(**given)), limits=limits)
        time = _time(arguments, card, answer.requirement, limits)
        return replace(
            answer,
            card=card,
            time=time,
            num_tokens=arguments.all_tokens,
        )


def _check_card_is_asked(arguments: PlanArguments, card: Card | None) -> None:
    """Refuse options that only change planned times if no card is known."""
    for name, default in (("efficiency", EFFICIENCY), ("disk_bandwidth", DISK_BANDWIDTH)):
        value = getattr(arguments, name)
        if card is None and value != default:
            raise ValueError(f"--{name} {value:g} takes effect only with a card. Name one with --gpu, or leave it out")


def _limits(arguments: PlanArguments, card: Card | None, num_gpus: int) -> Limits | None:
    """Return the limits that `--fit` sets, or else the limits of the card, or None without either."""
    device_bytes = arguments.fit_bytes
    if device_bytes is None:
        if card is None:
            return None
        device_bytes = card.memory_bytes
    return limits_of(
        device_bytes,
        host_bytes=arguments.fit_host_bytes,
        disk_bytes=arguments.fit_disk_bytes,
        here=trains_here(arguments.gpu),
        num_gpus=num_gpus,
    )


def _time(
    arguments: PlanArguments,
    card: Card | None,
    requirement: MemoryRequirement,
    limits: Limits | None,
) -> PlannedTime | None:
    """Plan the time of an update, or return None without a card or if the run does not fit the GPU's memory."""
    if card is None or limits is None or requirement.missing_device_bytes(limits):
        return None
    in_fp32 = requirement.plan.request.precision == "fp32"
    rates = card.rates(efficiency=arguments.efficiency, in_fp32=in_fp32, disk_bandwidth=arguments.disk_bandwidth)
    return plan_time(with_room_ahead(requirement, limits.device_bytes), rates)


def _search(arguments: PlanArguments, given: dict[str, Any], limits: Limits, model: ModelFigures, tell: Tell) -> Found:
    return search(
        start_of_search(given),
        all_candidates(arguments.min_seq_length),
        limits,
        _estimator(model),
        fixed=arguments.given,
        tell=tell,
    )


def _chosen(
    arguments: PlanArguments, given: dict[str, Any], card: Card, limits: Limits, model: ModelFigures, tell: Tell
) -> Answer:
    """Choose the layers per group. With `--fit`, search the other settings first, at one layer per group."""
    given = {**given, "layers_per_group": 1}
    found, request = None, PlanRequest(**given)
    check_has_copies(request)
    if arguments.has_limit:
        found = _search(arguments, given, limits, model, tell)
        request = found.requirement.plan.request
    prefetch_bytes = given.get("prefetch_bytes")
    choice = choose_layers_per_group(request, model.config, card, limits, prefetch_bytes=prefetch_bytes, tell=tell)
    return Answer(model=model, requirement=choice.chosen.requirement, limits=limits, found=found, choice=choice)


def _largest(
    field: LargestField,
    given: dict[str, Any],
    card: Card | None,
    limits: Limits | None,
    model: ModelFigures,
    tell: Tell,
) -> Answer:
    if limits is None:
        raise ValueError(f"--max {field} needs a limit. Name a card by --gpu, or its memory by --fit 24GiB")
    positions = usable_positions(model.config) if field == "seq_length" else None
    most = None if positions is None else positions[0]
    found = find_largest(PlanRequest(**given), field, limits, _estimator(model), most=most, tell=tell)
    return Answer(model=model, requirement=found.requirement, limits=limits, largest=found)


def _compare(
    arguments: PlanArguments,
    given: dict[str, Any],
    card: Card,
    limits: Limits,
    model: ModelFigures,
    tell: Tell,
    progress: PlanProgress,
) -> Comparison:
    question = Question(
        model=model,
        given=given,
        limits=limits,
        card=card,
        efficiency=arguments.efficiency,
        disk_bandwidth=arguments.disk_bandwidth,
    )
    ready: list[Sequence[Row]] = []
    num_ways = len(ways_of(model, given))
    with _keeping(ready):
        for rows in compare(question):
            ready.append(rows)
            numbers = progress.show(len(ready), num_ways)
            for row in rows:
                tell(f"{numbers}: {describe_row(row)}")
    rows = in_order([row for rows in ready for row in rows])
    return Comparison(question=question, rows=rows, num_missing=num_ways - len(ready))


@contextmanager
def _keeping(ready: Sequence[object]) -> Iterator[None]:
    """End at Ctrl-C without an error, if something is ready."""
    try:
        yield
    except KeyboardInterrupt:
        if not ready:
            raise


def _estimator(model: ModelFigures) -> Estimator:
    planner = Planner(model.config)
    return lambda request: add_allowance(planner.plan(request))


def _sweep(
    model: ModelFigures, arguments: PlanArguments, sweep: Sweep, tell: Tell, progress: PlanProgress
) -> tuple[tuple[Any, MemoryRequirement], ...]:
    # Check every value before the first is planned.
    requests = [PlanRequest(**_settings(arguments, model, **{sweep.field: value})) for value in sweep.values]
    requirements: list[tuple[Any, MemoryRequirement]] = []
    estimate = _estimator(model)
    with _keeping(requirements):
        for value, request in zip(sweep.values, requests, strict=True):
            requirement = estimate(request)
            requirements.append((value, requirement))
            numbers = progress.show(len(requirements), len(requests))
            size = format_bytes(requirement.device_bytes)
            tell(f"{numbers}: {sweep.field}={value}: {size} with the allowance")
    return tuple(requirements)


def _settings(arguments: PlanArguments, model: ModelFigures, **changes: Any) -> dict[str, Any]:
    """Return the fields of the request that the user set, and those whose default depends on the model.

    Args:
        arguments: Arguments of the command.
        model: Model that trains.
        changes: Other values of some fields.
    """
    given = {"task": _task(model, arguments.given.get("task")), **arguments.given, **changes}
    positions = usable_positions(model.config)
    if positions is not None and positions[0] < _DEFAULT["seq_length"]:
        given.setdefault("seq_length", positions[0])
    method = given.get("method", _DEFAULT["method"])
    if method in arguments.follow_checkpoint:
        is_narrow = model.dtype in (torch.bfloat16, torch.float16)
        given["precision"] = precision_in_16_bits(method, given.get("master")) if is_narrow else "fp32"
    return given


def _describe_defaults(arguments: PlanArguments, answer: Answer | SweepAnswer | Comparison) -> str | None:
    """Name the main settings that were not given, with their values. None if all were given."""
    decided = {arguments.largest, *arguments.given}
    if isinstance(answer, Comparison):
        length = answer.question.given.get("seq_length", _DEFAULT["seq_length"])
        return None if "seq_length" in decided else f"not given, so as slivertune train has it: seq_length {length}"
    if isinstance(answer, SweepAnswer):
        requests = [each.plan.request for _, each in answer.requirements]
        decided.add(answer.field)
    else:
        requests = [(answer.requirement if answer.found is None else answer.found.start).plan.request]
    said = []
    for name in ("batch_size", "seq_length", "precision"):
        if name not in decided and len(values := {getattr(each, name) for each in requests}) == 1:
            said.append(f"{name} {values.pop()}")
            if name == "precision" and arguments.follow_checkpoint and answer.model.dtype is None:
                said[-1] += " (the model's config names no dtype)"
    if "gradient_checkpointing" not in decided:
        said.append("no gradient_checkpointing")
    who = "so" if arguments.searches else "so as slivertune train has it"
    return f"not given, {who}: {', '.join(said)}" if said else None


def _task(model: ModelFigures, asked: Any) -> Any:
    tasks = model.tasks()
    if asked is None or asked in tasks:
        return asked or tasks[0]
    raise ValueError(
        f"task={asked!r}: a {model.config.model_type!r} has no head for it. Use {' or '.join(map(repr, tasks))}"
    )


def _console(*, stderr: bool) -> Console:
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, stderr=stderr, width=_WIDTH_WITHOUT_TERMINAL)
