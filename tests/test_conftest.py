"""What holds for every test, seen at work: the rules on warnings, and one number of threads.

The number is that of the recipe, its processes, the ranks and the scripts.
"""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.helpers.launching import environment, run_python
from tests.helpers.making import without_outer_make
from tests.helpers.ranks import run_ranks

THREADS = "3"
"""Neither the default nor the number that a run is likely to have."""


def warn_from(module: str, category: type[Warning], message: str = "careful") -> None:
    warnings.warn_explicit(message, category, filename=f"{module}.py", lineno=1, module=module)


@pytest.mark.parametrize("module", ["slivertune", "slivertune.hift.optimizer", "tests.hift.test_optimizer"])
@pytest.mark.parametrize("category", [UserWarning, RuntimeWarning, ResourceWarning])
def test_any_warning_that_our_code_is_to_blame_for_is_an_error(module: str, category: type[Warning]) -> None:
    with pytest.raises(category, match="careful"):
        warn_from(module, category)


@pytest.mark.parametrize("category", [DeprecationWarning, PendingDeprecationWarning, FutureWarning])
@pytest.mark.parametrize("module", ["torch.optim.adamw", "transformers.trainer", "accelerate.state"])
def test_a_deprecation_is_an_error_wherever_it_is_raised(module: str, category: type[Warning]) -> None:
    with pytest.raises(category, match="careful"):
        warn_from(module, category)


@pytest.mark.parametrize("module", ["torch.autograd.graph", "slivertune_elsewhere"])
def test_other_warnings_of_other_packages_stay_warnings(module: str) -> None:
    # Not pytest.warns: it lifts every rule.
    with warnings.catch_warnings(record=True) as seen:
        warn_from(module, UserWarning)
    assert [str(warning.message) for warning in seen] == ["careful"]


def test_a_schedule_ahead_of_its_optimizer_is_an_error_when_a_library_ticks_it() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with pytest.raises(UserWarning, match="lr_scheduler"):
        exec("schedule.step()", {"__name__": "transformers.trainer", "schedule": schedule})


@pytest.mark.parametrize("library", ["transformers.modeling_utils", "accelerate.utils"])
def test_a_deprecation_that_is_only_logged_is_collected(library: str, no_deprecation_is_logged: list[str]) -> None:
    logging.getLogger(library).warning("`torch_dtype` is deprecated! Use `dtype` instead!")
    logging.getLogger(library).warning("nothing to see here")
    (record,) = no_deprecation_is_logged
    assert "`torch_dtype` is deprecated" in record and "test_conftest.py" in record
    no_deprecation_is_logged.clear()


def threads_of_a_rank(rank: int, num_ranks: int) -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@pytest.mark.parametrize(("given", "expected"), [((), "1"), (("THREADS=2",), "2")])
def test_make_test_passes_its_threads_to_pytest(checkout: Path, given: tuple[str, ...], expected: str) -> None:
    call, own = ["make", "--dry-run", "test", *given], without_outer_make()
    done = subprocess.run(call, cwd=checkout, env=own, capture_output=True, text=True, timeout=60, check=True)
    (line,) = [line for line in done.stdout.splitlines() if " -m pytest " in line]
    assert line.startswith(f"OMP_NUM_THREADS={expected} ")


def test_ranks_and_launched_scripts_have_as_many_threads_as_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", THREADS)
    assert run_ranks(threads_of_a_rank, 2) == [(int(THREADS), THREADS)] * 2
    assert (
        subprocess.check_output(
            [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"], env=environment(), text=True
        ).strip()
        == THREADS
    )


def test_the_head_of_a_run_says_threads_and_capability(checkout: Path) -> None:
    done = run_python(
        *("-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/core/test_ledger.py"),
        cwd=checkout,
        OMP_NUM_THREADS="1",
        ATEN_CPU_CAPABILITY="default",
    )
    assert "get_num_threads() = 1, get_cpu_capability() = DEFAULT" in done.stdout
