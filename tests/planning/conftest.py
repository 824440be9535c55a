from typing import Any

import pytest

from slivertune.planning import command, fewer_blocks, layers_per_group, make
from tests.planning.made import plan_made_once, planner_by


@pytest.fixture
def plans_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `slivertune plan` and the choice of layers take the plans that were made before for the same request."""
    for module in (command, layers_per_group):
        monkeypatch.setattr(module, "Planner", planner_by(plan_made_once))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of blocks of all models that are measured, fewer ones first however many there are."""
    monkeypatch.setattr(fewer_blocks, "_MOST_SHARE", 10)
    seen = list[int]()
    measure = make.SizedModel.measure

    def watched(self: Any, *args: Any) -> Any:
        seen.append(self._config.get_text_config().num_hidden_layers)
        return measure(self, *args)

    monkeypatch.setattr(make.SizedModel, "measure", watched)
    return seen
