"""Hooks that run also where a model's forward is called directly, past torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slivertune.core.direct_calls import call_through_hooks, may_be_called_directly

ROW = torch.ones(1, 2)


class Hooked:
    """A pair of hooks, the stand-in beside them, and the calls that the hooks saw."""

    def __init__(self, model: nn.Module) -> None:
        self.num_calls, self.is_inside = 0, False
        self._undo: list[Callable[[], None]] = [
            model.register_forward_pre_hook(self._begin).remove,
            model.register_forward_hook(self._end, always_call=True).remove,
            call_through_hooks(model, lambda: self.is_inside),
        ]

    def _begin(self, *_: Any) -> None:
        assert not self.is_inside
        self.num_calls, self.is_inside = self.num_calls + 1, True

    def _end(self, *_: Any) -> None:
        self.is_inside = False

    def remove(self) -> None:
        for undo in self._undo:
            undo()


@pytest.mark.parametrize("call", [lambda model: model(ROW), lambda model: model.forward(ROW)], ids=["call", "forward"])
@pytest.mark.parametrize("first", [0, 1], ids=["the lower one is removed first", "the upper one is removed first"])
def test_hooks_run_once_however_the_model_is_called_and_whichever_is_removed_first(
    first: int, call: Callable[[nn.Module], torch.Tensor]
) -> None:
    model = nn.Linear(2, 2)
    expected = model(ROW)
    pair = [Hooked(model), Hooked(model)]
    assert torch.equal(call(model), expected) and [each.num_calls for each in pair] == [1, 1]
    pair[first].remove()
    assert torch.equal(call(model), expected) and pair[1 - first].num_calls == 2 and pair[first].num_calls == 1
    pair[1 - first].remove()
    assert torch.equal(call(model), expected) and [pair[first].num_calls, pair[1 - first].num_calls] == [1, 2]


def test_a_model_whose_forward_fails_is_called_through_its_hooks_again() -> None:
    model = nn.Linear(2, 2)
    hooked = Hooked(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.forward(torch.ones(1, 3))
    assert hooked.num_calls == 2


def test_models_inside_of_peft_and_sentence_transformers_alone_may_be_called_directly() -> None:
    for library in ("peft", "sentence_transformers"):
        wrapper = type("Wrapper", (nn.Sequential,), {"__module__": f"{library}.tuners"})
        assert may_be_called_directly(wrapper(nn.Linear(2, 2)))
    assert not may_be_called_directly(nn.Sequential(nn.Linear(2, 2)))
