"""Runs functions on several ranks: processes of their own, gloo over a file, with this run's threads each.

Ranks take seconds to start, so they stay, and take case after case. Each case reports for itself. If one fails, hangs,
kills a rank, or leaves something behind that can't be set back, its ranks end and the next case gets new ones.
"""

import atexit
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.rank_processes import RankError, RankProcesses

_waiting: dict[tuple[int, float, bool], RankProcesses] = {}
"""By their number, their collectives' timeout and whether they pretend CUDA devices, those that take the next case."""


@atexit.register
def _close_all() -> None:
    while _waiting:
        _waiting.popitem()[1].close()


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 180,
    collective_timeout_s: float = 60,
    may_die: Collection[int] = (),
    is_first: bool = False,
    pretends_cuda: bool = False,
) -> list[Any]:
    """Run `function(rank, num_ranks, *args)` on every rank of a gloo group.

    Args:
        function: A module's own function; its result is pickled.
        num_ranks: Ranks.
        *args: Picklable.
        timeout_s: Seconds until a rank that has not returned counts as hung.
        collective_timeout_s: Seconds until a collective raises.
        may_die: Ranks that may vanish without a result, which is None then; nobody waits for them.
        is_first: Whether it has to be the first case of its processes.
        pretends_cuda: Whether CUDA devices are pretended in them (`tests/pretended_cuda`).

    Returns:
        The result of each rank.

    Raises:
        RankError: With the traceback of every rank that failed, or the names of those that hung or vanished, and what
            each printed.
    """
    if may_die or is_first:
        with closing(_new_ranks(num_ranks, collective_timeout_s, pretends_cuda)) as alone:
            return alone.run(function, args, timeout_s, may_die)
    key = num_ranks, collective_timeout_s, pretends_cuda
    ranks = _waiting.pop(key, None)
    if ranks is not None and (left := ranks.begin()):
        print(f"new ranks, since the case before left behind: {', '.join(left)}")
        ranks.close()
        ranks = None
    ranks = ranks or _new_ranks(*key)
    results = ranks.run(function, args, timeout_s, may_die)
    _waiting[key] = ranks
    return results


def _new_ranks(num_ranks: int, collective_timeout_s: float, pretends_cuda: bool) -> RankProcesses:
    ranks = RankProcesses(num_ranks, collective_timeout_s, pretends_cuda)
    if left := ranks.begin():
        ranks.close()
        raise RankError(f"ranks that have run nothing can't begin: {', '.join(left)}")
    return ranks


def ran_once(function: Callable[..., Any], num_ranks: int, *more: Any, **options: Any) -> Callable[..., list[Any]]:
    """A function of some arguments that runs their case when it is called first, and then knows how it ended.

    Args:
        function: Of `run_ranks`; the arguments come before `more`.
        num_ranks: Ranks.
        *more: Arguments of every case.
        **options: Of `run_ranks`.

    Returns:
        A function that gives what each rank has returned, or raises what was raised.
    """
    known: dict[tuple[Any, ...], list[Any] | RankError] = {}

    def run(*args: Any) -> list[Any]:
        if args not in known:
            try:
                known[args] = run_ranks(function, num_ranks, *args, *more, **options)
            except RankError as error:
                known[args] = error
        found = known[args]
        if isinstance(found, RankError):
            raise found
        return found

    return run


@contextmanager
def single_rank(folder: Path) -> Iterator[None]:
    """A process group of one rank inside, for torch.distributed.checkpoint."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def quick(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The values of a parametrized test, all but a few of them marked as slow.

    Args:
        cases: Names, or tuples of several arguments.
        kept: Those that `make test` runs; each is one of `cases`.

    Returns:
        What `pytest.mark.parametrize` takes.
    """
    cases = list(cases)
    unknown = [case for case in kept if case not in cases]
    assert not unknown, f"{unknown} are none of {cases}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.slow)
        for case in cases
    ]


def asked_for(request: pytest.FixtureRequest, *arguments: str) -> set[Any]:
    """The values with which the tests of this run call for a fixture's results.

    Args:
        request: Of a fixture of a module.
        *arguments: Names of arguments that its tests are parametrized by.

    Returns:
        The value, or a tuple of several, of each test of the module that is parametrized by all of them.
    """
    found = set()
    for item in request.session.items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and all(name in values for name in arguments):
            asked = tuple(values[name] for name in arguments)
            found.add(asked if len(asked) > 1 else asked[0])
    return found
