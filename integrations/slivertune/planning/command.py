"""`slivertune plan`: find the model, plan it, say what came out."""

import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import transformers
from rich.console import Console

from slivertune.planning.answer import Answer, SweepAnswer
from slivertune.planning.arguments import PlanArguments, Sweep, parse_plan_arguments
from slivertune.planning.byte_text import format_bytes
from slivertune.planning.candidates import all_candidates
from slivertune.planning.cards import find_card
from slivertune.planning.configs import ModelFigures, find_model
from slivertune.planning.layers_per_group import check_has_copies, choose_layers_per_group
from slivertune.planning.make import make_plan
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.plot import draw, require_matplotlib
from slivertune.planning.report import line_printer, print_answer, print_sweep
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import Found, Tell, search, start_of_search

_WIDTH_WITHOUT_TERMINAL = 120


def run_plan(argv: Sequence[str]) -> None:
    """Do what `slivertune plan` was asked for.

    Args:
        argv: What follows `slivertune plan`.

    Raises:
        ValueError: If what was asked for does not hold together or can't be planned, or if nothing fits.
        ImportError: If a library is needed that is not installed, naming the extra.
    """
    arguments = parse_plan_arguments(argv)
    if arguments.plot is not None:
        require_matplotlib()
    answer = _answer(arguments)
    if arguments.plot is not None:
        draw(answer, arguments.plot)
    if arguments.json:
        print(json.dumps(answer.to_json(), indent=2))
        return
    console = _console(stderr=False)
    if isinstance(answer, SweepAnswer):
        print_sweep(answer, console)
    else:
        print_answer(answer, console)
    if arguments.plot is not None:
        console.print(f"drew {arguments.plot}", markup=False, soft_wrap=True)


def _answer(arguments: PlanArguments) -> Answer | SweepAnswer:
    console = _console(stderr=True)
    with _quiet_libraries(), console.status("planning ..."):
        model = find_model(arguments.model)
        given = {"task": _task(model, arguments.given.get("task")), **arguments.given}
        limits = None
        if arguments.fit_bytes is not None:
            limits = Limits(device_bytes=arguments.fit_bytes, host_bytes=arguments.fit_host_bytes)
        if arguments.sweep is not None:
            requirements = _sweep(model, given, arguments.sweep, line_printer(console))
            return SweepAnswer(model=model, field=arguments.sweep.field, requirements=requirements, limits=limits)
        if arguments.chooses_layers:
            return _chosen(arguments, given, limits, model, line_printer(console))
        if limits is None:
            return Answer(model=model, requirement=_estimate(PlanRequest(**given), model))
        found = _search(arguments, given, limits, model, line_printer(console))
        return Answer(model=model, requirement=found.requirement, limits=limits, found=found)


def _search(arguments: PlanArguments, given: dict[str, Any], limits: Limits, model: ModelFigures, tell: Tell) -> Found:
    return search(
        start_of_search(given),
        all_candidates(arguments.min_seq_length),
        limits,
        lambda request: _estimate(request, model),
        fixed=arguments.given,
        tell=tell,
    )


def _chosen(
    arguments: PlanArguments, given: dict[str, Any], limits: Limits | None, model: ModelFigures, tell: Tell
) -> Answer:
    """With `--fit`, other settings are found for one layer a step, and then the most layers under these."""
    card, found, request = find_card(arguments.gpu), None, PlanRequest(**given)
    check_has_copies(request)
    if limits is None:
        limits = Limits(device_bytes=card.memory_bytes)
    else:
        found = _search(arguments, given, limits, model, tell)
        request = found.requirement.plan.request
    prefetch_bytes = given.get("prefetch_bytes")
    choice = choose_layers_per_group(request, model.config, card, limits, prefetch_bytes=prefetch_bytes, tell=tell)
    return Answer(model=model, requirement=choice.chosen.requirement, limits=limits, found=found, choice=choice)


def _estimate(request: PlanRequest, model: ModelFigures) -> MemoryRequirement:
    return add_allowance(make_plan(request, model.config))


def _sweep(
    model: ModelFigures, given: dict[str, Any], sweep: Sweep, tell: Tell
) -> tuple[tuple[Any, MemoryRequirement], ...]:
    # Every value is checked before the first is planned.
    requests = [PlanRequest(**{**given, sweep.field: value}) for value in sweep.values]
    requirements = []
    for value, request in zip(sweep.values, requests, strict=True):
        requirement = _estimate(request, model)
        tell(f"{sweep.field}={value}: {format_bytes(requirement.device_bytes)} with the allowance")
        requirements.append((value, requirement))
    return tuple(requirements)


def _task(model: ModelFigures, asked: Any) -> Any:
    tasks = model.tasks()
    if asked is None or asked in tasks:
        return asked or tasks[0]
    raise ValueError(
        f"task={asked!r}: a {model.config.model_type!r} has no head for it; take {' or '.join(map(repr, tasks))}"
    )


def _console(*, stderr: bool) -> Console:
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, stderr=stderr, width=_WIDTH_WITHOUT_TERMINAL)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Let standard output be the answer's alone, and hold back what libraries say of a model that will never run."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # bitsandbytes warns of a CPU kernel that a plan never calls.
    bitsandbytes = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = bitsandbytes.level
    bitsandbytes.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
            yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
        bitsandbytes.setLevel(level)
