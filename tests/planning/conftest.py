import pytest

from slivertune.planning import command, layers_per_group
from tests.planning.made import plan_made_once, planner_by


@pytest.fixture
def plans_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `slivertune plan` and the choice of layers take the plans that were made before for the same request."""
    for module in (command, layers_per_group):
        monkeypatch.setattr(module, "Planner", planner_by(plan_made_once))
