"""Runs of SFT on ranks that are saved on their way and taken up again, and what a trained model leaves behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slivertune import SFTConfig
from slivertune.core.layout import Layout
from tests.helpers.models import assert_same_tree, differing, weights
from tests.helpers.tolerance import with_exact
from tests.interop import test_trainer_layouts as trainers
from tests.interop.test_trainer_ranks import BATCH
from tests.parallel.sft.reference import assert_norms_are, assert_state_is
from tests.parallel.sft.runs import (
    MA,
    Case,
    Run,
    accelerator_of,
    merged_weights,
    prescribed_reference,
    quieten_deepspeed,
)

RESUMED: dict[str, Case] = {
    "AG": Case(accumulation=2, clip=2.0),
    "MA": Case(selection=MA, accumulation=2, clip=2.0, updates=16),
}
CUT = 9
"""Updates before a run is saved: inside the phase of updates 8 to 10, after its first update."""
MORE = 4
"""Updates of another number of ranks; a reselection is among them."""


def save_and_resume(
    rank: int, num_ranks: int, layouts: list[Layout], folder: Path, plugin: Mapping[str, Any] | None = None
) -> dict[tuple[str, str], Any]:
    """Under every layout, each of `RESUMED`: a run that is saved on its way, and one that continues from there.

    Returns:
        For each layout and case the two runs' results, and the state when it was saved; `folder/layout/case` holds the
        checkpoint, and `folder/layout/case-deltas` the deltas at the end.
    """
    found: dict[tuple[str, str], Any] = {}
    for layout in layouts:
        for name, case in RESUMED.items():
            checkpoint = folder / layout / name
            with accelerator_of(layout, case, **plugin or {}) as accelerator:
                run = Run(case, accelerator, rank)
                run.train(0, CUT)
                accelerator.save_state(str(checkpoint))
                saved = run.result()
                run.train(CUT, case.updates)
                straight = run.result()
                run.sft.save_pretrained(folder / layout / f"{name}-deltas")
            with accelerator_of(layout, case, **plugin or {}) as accelerator:
                run = Run(case, accelerator, rank)
                accelerator.load_state(str(checkpoint))
                run.train(CUT, case.updates)
                found[layout, name] = {"saved": saved, "straight": straight, "resumed": run.result()}
                found[layout, name]["weights"] = merged_weights(run)
    return found


def assert_went_on(results: list[dict[str, Any]]) -> None:
    """On every rank the run that was taken up has the bits of the one that never stopped."""
    for each in results:
        straight, resumed = each["straight"], each["resumed"]
        assert straight["norms"][CUT:] == resumed["norms"]
        assert_same_tree(straight["state"], resumed["state"])


def load_elsewhere(rank: int, num_ranks: int, layout: Layout, folder: Path) -> dict[str, Any]:
    """Load what another number of ranks saved; the states then, and after some more updates."""
    found = {}
    for name, case in RESUMED.items():
        with accelerator_of(layout, case) as accelerator:
            run = Run(case, accelerator, rank)
            accelerator.load_state(str(folder / name))
            loaded = run.result()
            run.train(CUT, CUT + MORE)
            found[name] = {"loaded": loaded, "continued": run.result()}
    return found


def assert_continued(results: list[dict[str, Any]], saved: Mapping[str, Any], before: int) -> None:
    """These ranks have what was saved by so many, and then what the naive reference has of their own batches."""
    for name, case in RESUMED.items():
        naive, norms = prescribed_reference(case, [before] * CUT + [len(results)] * MORE)
        for result in results:
            assert_same_tree(result[name]["loaded"]["state"], saved[name]["saved"]["state"])
            assert result[name]["continued"]["updates"] == CUT + MORE
            assert_norms_are(result[name]["continued"]["norms"], norms[CUT:], naive, case.accumulation)
            assert_state_is(result[name]["continued"]["state"], naive)


TRAINED: dict[str, SFTConfig] = {
    "AG": trainers.SFT,
    "MA": SFTConfig(density=0.1, reselection_interval=5, selection="momentum"),
}
"""Twelve updates, saved after seven: MA's weights are reselected after 5 and 10."""


def resume_trainers(
    rank: int, num_ranks: int, cases: list[tuple[Layout, str]], folder: Path
) -> dict[tuple[str, str], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """The deltas of a stock Trainer's run that saved a checkpoint and went on, and of one that was taken up there."""
    found: dict[tuple[str, str], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
    for layout, name in cases:
        if layout.startswith("zero"):
            quieten_deepspeed()
        output = folder / "trainer" / layout / name
        options: list[dict[str, Any]] = [
            {"save_strategy": "steps", "save_steps": trainers.STOP},
            {"resume": str(output / f"checkpoint-{trainers.STOP}")},
        ]
        deltas = []
        for each in options:
            with trainers.states(layout):
                trainer, last = trainers.train(output, BATCH, layout, TRAINED[name], **each)
                deltas += last
                trainer.accelerator.free_memory()
        found[layout, name] = (deltas[0], deltas[1])
    return found


def assert_trainers_went_on(results: list[Any], name: str, folder: Path) -> None:
    """Both runs of every rank have the same bits, and about those of one process on the whole batch."""
    with trainers.states(None):
        of_one = partial(trainers.train, folder, len(results) * BATCH, None, TRAINED[name])
        ((_, (expected,)), (_, (exact,))) = with_exact(of_one)
    for straight, resumed in results:
        assert differing(straight, resumed) == []
        trainers.assert_near(straight, expected, exact)


def load_without_the_library(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters of every Hugging Face checkpoint in a folder, read where slivertune can't be imported."""
    code = (
        "import sys, pathlib; sys.modules['slivertune'] = None; import torch; "
        "from transformers import AutoModelForCausalLM; "
        f"folders = [path.parent for path in pathlib.Path({str(folder)!r}).glob('*/*/config.json')]; "
        "models = {'/'.join(each.parts[-2:]): AutoModelForCausalLM.from_pretrained(each, dtype='auto') "
        "for each in folders}; "
        f"torch.save({{name: dict(model.named_parameters()) for name, model in models.items()}}, "
        f"{str(folder / 'loaded.pt')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
    loaded: dict[str, dict[str, torch.Tensor]] = torch.load(folder / "loaded.pt")
    return loaded


def assert_is_plain(loaded: dict[str, torch.Tensor], merged: dict[str, torch.Tensor], case: Case) -> None:
    """A checkpoint has the parameters of a plain model, with the bits of the trained one."""
    own = weights(case.build_model())
    assert loaded.keys() == own.keys()
    assert differing(loaded, {name: merged[name] for name in own}) == []
    assert differing(loaded, own) == [name for name in sorted(own) if "proj" in name]
