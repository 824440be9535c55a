"""The rules on warnings in pyproject.toml and conftest.py, seen at work."""

import logging
import warnings

import pytest


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
    import torch

    schedule = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), lambda _: 1.0
    )
    with pytest.raises(UserWarning, match="lr_scheduler"):
        exec("schedule.step()", {"__name__": "transformers.trainer", "schedule": schedule})


@pytest.mark.parametrize("library", ["transformers.modeling_utils", "accelerate.utils"])
def test_a_deprecation_that_is_only_logged_is_collected(library: str, no_deprecation_is_logged: list[str]) -> None:
    logging.getLogger(library).warning("`torch_dtype` is deprecated! Use `dtype` instead!")
    logging.getLogger(library).warning("nothing to see here")
    (record,) = no_deprecation_is_logged
    assert "`torch_dtype` is deprecated" in record and "test_warnings.py" in record
    no_deprecation_is_logged.clear()
