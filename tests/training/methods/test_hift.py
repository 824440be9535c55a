from pathlib import Path

import pytest

from slivertune.training.methods.hift import HiFTArguments, HiFTMethod
from slivertune.training.methods.method import SliverMethod
from slivertune.training.methods.sft import SFTArguments, SFTMethod
from tests.helpers.models import LAYERS, tiny_llama
from tests.training.test_callbacks import make_trainer


def attached(folder: Path, **settings: int) -> HiFTMethod:
    method = HiFTMethod(HiFTArguments(**settings))
    method.attach(make_trainer(folder))
    return method


def test_a_rate_that_nobody_chose_for_hift_is_pointed_at(tmp_path: Path) -> None:
    method = attached(tmp_path)
    (note,) = method.notes(tiny_llama(), learning_rate=5e-5)
    assert note.startswith(f"HiFT updates a parameter once in {LAYERS} updates here")
    assert note.endswith("--learning_rate was not given, so 5e-05 is used")
    assert method.notes(tiny_llama(), learning_rate=None) == []
    assert attached(tmp_path, layers_per_group=LAYERS).notes(tiny_llama(), learning_rate=5e-5) == []


@pytest.mark.parametrize(("settings", "updates"), [({}, 2 * LAYERS), ({"steps_per_group": 2}, 2 * LAYERS)])
def test_a_line_takes_as_many_whole_rounds_as_make_eight_updates(
    settings: dict[str, int], updates: int, tmp_path: Path
) -> None:
    assert attached(tmp_path, **settings).logging_steps() == updates


@pytest.mark.parametrize("method", [HiFTMethod(HiFTArguments()), SFTMethod(SFTArguments())])
def test_it_says_so_when_it_is_asked_before_it_is_attached(method: SliverMethod) -> None:
    with pytest.raises(RuntimeError, match=f"{method.name} is attached to no Trainer; call attach first"):
        method.lines()
