import inspect
import re
import sys
from types import ModuleType
from typing import Any, get_args

import pytest

from slivertune import SFT, HiFT
from slivertune.core.layout import Layout
from slivertune.core.sliver import Sliver
from slivertune.parallel import adapters
from slivertune.parallel.adapters import EngineAdapter, LayoutAdapter, adapter_of, engine_adapter_of, register_adapters

LAYOUTS: list[Layout] = [layout for layout in get_args(Layout) if layout != "single"]


def of_method(kind: type[Sliver]) -> Sliver:
    return object.__new__(kind)


def kinds_of_arguments(function: Any) -> list[Any]:
    return [each.kind for name, each in inspect.signature(function).parameters.items() if name != "self"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [HiFT, SFT])
def test_every_method_has_an_adapter_of_every_layout(kind: type[Sliver], layout: Layout) -> None:
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
        assert kinds_of_arguments(engine_adapter_of(of_method(kind), layout).initialize) == kinds_of_arguments(
            EngineAdapter.initialize
        )
    adapter = adapter_of(of_method(kind), layout)
    assert kinds_of_arguments(adapter.prepare) == kinds_of_arguments(LayoutAdapter.prepare)
    assert adapter.__name__.split(".")[-2:] == [re.sub(r"(?<=zero)\d", "", layout), kind.method]  # type: ignore[attr-defined]


class Another(HiFT):
    method = "another"


def test_a_method_of_another_package_trains_under_the_layouts_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_adapters", dict(adapters._adapters))
    module = ModuleType("another_ddp")
    monkeypatch.setitem(sys.modules, "another_ddp", module)
    with pytest.raises(ValueError, match=r"Another does not train under ddp; it does on one device$"):
        adapter_of(of_method(Another), "ddp")
    register_adapters("another", ddp="another_ddp")
    assert adapter_of(of_method(Another), "ddp") is module
    with pytest.raises(ValueError, match=r"Another does not train under zero2; it does on one device and under ddp$"):
        adapter_of(of_method(Another), "zero2")
