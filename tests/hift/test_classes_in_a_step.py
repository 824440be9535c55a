"""How many ideas a step is made of: the classes of ours whose methods run in it, counted."""

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import slivertune as st
from tests.helpers.models import small_decoder, token_batches

PACKAGE = str(Path(st.__file__).parent)
MOST_CLASSES = 17
"""Three of them move state between host and device: `CopyStreams`, `DeviceSlots` and `Prefetcher`. A `Weight` says
where it computes, since it may wait elsewhere. `DeviceGradients` is the route of gradients to the step."""


class ClassesThatRan:
    """Notes the classes of the package whose methods run, by module and qualified name; methods in closures too."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """What `sys.setprofile` calls."""
        if event != "call":
            return
        # A generated method of a dataclass has no file, but its module's names.
        module = str(frame.f_globals.get("__name__", ""))
        class_name, _, _ = _function_of(frame.f_code.co_qualname).rpartition(".")
        if class_name and (module.partition(".")[0] == "slivertune" or frame.f_code.co_filename.startswith(PACKAGE)):
            self.names.add(f"{module}.{class_name}")


def _function_of(name: str) -> str:
    """The function or method that a closure of this qualified name is in; the name itself if it is no closure."""
    outer, _, last = name.rpartition(".")
    if outer.endswith(".<locals>"):
        return _function_of(outer.removesuffix(".<locals>"))
    return _function_of(outer) if outer and last.startswith("<") else name


def test_a_step_runs_methods_of_few_classes() -> None:
    model = small_decoder(dtype=torch.bfloat16)
    optimizer = st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=1e-3)
    batch = token_batches(1)[0]

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()

    for _ in range(optimizer.cycle_length):
        step()
    gc.collect()  # what other tests have left is no part of the step
    ran = ClassesThatRan()
    sys.setprofile(ran)
    try:
        for _ in range(optimizer.cycle_length):
            step()
    finally:
        sys.setprofile(None)
    assert "slivertune.hift.optimizer.HiFT" in ran.names
    assert len(ran.names) <= MOST_CLASSES, "\n".join(sorted(ran.names))
