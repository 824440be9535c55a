"""Every save of this library, with a fault in each of its file operations: the old or the new is whole."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
from safetensors import safe_open
from transformers import Trainer, TrainingArguments

from slivertune.core.atomic import recover
from slivertune.deltas import load
from slivertune.deltas.merge import merge, unmerge
from slivertune.parallel.checkpoint.sidecar import load_state, save_state
from slivertune.planning.answer import Answer
from slivertune.planning.plot import draw
from slivertune.tokentune.quality import GradientQuality, QualityRow
from slivertune.training.embedded.base_model import BaseRecipe, save_base_model
from slivertune.training.methods.dense import DenseMethod
from slivertune.training.ranks.coordinator import LaunchCoordinator
from tests.deltas.files import UP, write_deltas
from tests.helpers.faults import Fault, Operations, counted, denied, error_of, full_disk, hidden, interrupted
from tests.helpers.models import tiny_llama
from tests.helpers.trained import built, trained
from tests.planning.made import tiny_model
from tests.planning.test_report import REQUIREMENT

pytestmark = pytest.mark.slow

Save = Callable[[Path, int], object]
"""Writes a version under a path; the version before it is there already, where the save may replace it."""


def save_deltas(target: Path, version: int) -> None:
    write_deltas(target, tiny_llama(), UP, seed=version)


@cache
def base_and_deltas(root: Path) -> tuple[Path, Path]:
    base = root / "base"
    tiny_llama().save_pretrained(base)
    return base, write_deltas(root / "for the base", tiny_llama(), UP)


def save_merged(target: Path, version: int) -> None:
    base, deltas = base_and_deltas(target.parent.parent)
    merge(base, deltas, target)


@cache
def merged(root: Path) -> Path:
    merge(*base_and_deltas(root), root / "merged")
    return root / "merged"


def save_unmerged(target: Path, version: int) -> None:
    unmerge(merged(target.parent.parent), target)


trained_once = cache(trained)


def save_model(target: Path, version: int) -> None:
    # Where a run has its own folder, the model lies below it.
    DenseMethod().save(
        Trainer(tiny_llama(seed=version), TrainingArguments(str(target.parent), report_to="none", use_cpu=True)),
        target.parent,
        base_name="base",
        coordinator=LaunchCoordinator(),
    )


def save_cache(target: Path, version: int) -> None:
    save_base_model(tiny_llama(seed=version), BaseRecipe(seed=version), target)


def save_quality(target: Path, version: int) -> None:
    GradientQuality(
        rows=(QualityRow(pattern="random", ratio=0.5, cosine=0.5, cosine_deviation=0.1, norm_ratio=1.0),), num_draws=1
    ).plot(target)


def save_plot(target: Path, version: int) -> None:
    draw(Answer(model=tiny_model(), requirement=REQUIREMENT), target)


def save_results(target: Path, version: int) -> None:
    from slivertune.training.output.report import write_results

    write_results(SimpleNamespace(as_json=lambda: {"num_steps": version}), target.parent)


SAVES: dict[str, tuple[str, Save, bool]] = {
    # Name of the target, how it is saved, and whether an older one may be there.
    "deltas in a new folder": ("deltas", save_deltas, False),
    "deltas over older ones": ("deltas", save_deltas, True),
    "a merged checkpoint": ("merged", save_merged, False),
    "an unmerged checkpoint": ("again", save_unmerged, False),
    "HiFT's state": ("hift", lambda target, version: save_state(trained_once("hift", version), target), True),
    "SFT's state": ("sft", lambda target, version: save_state(trained_once("sft", version), target), True),
    "a run's model": ("model", save_model, True),
    "the cached base model": ("0123456789abcdef", save_cache, True),
    "a run's results": ("results.json", save_results, True),
    "a plot of gradients": ("quality.png", save_quality, False),
    "a plot of a plan": ("plan.png", save_plot, False),
}


FOREIGN = ("training_args.bin",)
"""The Trainer's arguments, which hold the name of the run's folder."""


def content(path: Path) -> object:
    """What lies under a name: bytes, but for safetensors, whose metadata are in no order."""
    if path.is_dir():
        files = {str(each.relative_to(path)): each for each in path.rglob("*") if each.is_file()}
        return {name: content(file) for name, file in files.items() if not name.startswith(".") and name not in FOREIGN}
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key).flatten().view(torch.uint8).tolist() for key in sorted(file.keys())}
            metadata = {key: text for key, text in (file.metadata() or {}).items() if key != "file_sha256"}
        return metadata, tensors
    return path.read_bytes() if path.exists() else None


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("name", SAVES)
def test_a_fault_in_any_file_operation_of_a_save_leaves_the_old_or_the_new_whole(
    name: str, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drawing takes long, and what is drawn does not matter here.
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: path.write_bytes(b"PNG"))
    file, save, has_older = SAVES[name]
    before, after, warm = (tmp_path / each / file for each in ("before", "after", "warm"))
    for path in (before, after, warm):
        path.parent.mkdir()
    save(warm, 2)
    if not can_exchange and not (has_older and warm.is_dir()):
        pytest.skip("replaces no folder")
    if has_older:
        save(before, 1)
        shutil.copytree(before.parent, after.parent, dirs_exist_ok=True)
    old = content(before)
    operations = Operations(0, full_disk)
    with counted(operations, can_exchange=can_exchange):
        save(after, 2)
    new = content(after)
    assert new != old and len(operations.names) > 5
    for number, operation in enumerate(operations.names, 1):
        faults: tuple[Fault, ...] = (full_disk, denied, interrupted)
        # Long saves meet one fault an operation, and another one the other way.
        if len(operations.names) > 15:
            faults = (faults[(number + can_exchange) % 3],)
        for fault in faults:
            where = f"{operation}, number {number} of {operations.names}, {fault.__name__}"
            target = tmp_path / "try" / file
            shutil.copytree(before.parent, target.parent)
            with counted(Operations(number, fault), can_exchange=can_exchange):
                error = error_of(lambda target=target: save(target, 2))
            check_error(error, fault, target, where)
            recover(target)
            found = content(target)
            assert found == new or (error is not None and found == old), where
            visible = [each.name for each in target.parent.iterdir() if not each.name.startswith(".")]
            assert visible in ([file], [] if old is None else [file]), where
            if found == old or has_older:
                save(target, 2)
                assert content(target) == new, where
                assert hidden(target.parent) == [], where
            shutil.rmtree(target.parent)


def check_error(error: BaseException | None, fault: Fault, target: Path, where: str) -> None:
    if fault is interrupted:
        assert isinstance(error, KeyboardInterrupt), where
    elif error is not None:
        text = str(error)
        assert str(target) in text, f"{where}: {text}"
        assert text.count("could not be written") == 1, f"{where}: {text}"
        wanted = (
            ("No space left on device", "It needs", " free. Free") if fault is full_disk else ("Permission denied",)
        )
        assert all(each in text for each in wanted), f"{where}: {text}"
        assert isinstance(error, OSError) and error.errno == fault(where).errno, f"{where}: {text}"


def test_what_was_saved_is_what_is_read(tmp_path: Path) -> None:
    for name, (file, save, _) in SAVES.items():
        (tmp_path / name).mkdir()
        save(tmp_path / name / file, 2)
    assert load(tmp_path / "deltas in a new folder" / "deltas").deltas.keys() == {UP}
    assert json.loads((tmp_path / "a run's results" / "results.json").read_text()) == {"num_steps": 2}
    for method, name in (("hift", "HiFT's state"), ("sft", "SFT's state")):
        _, optimizer = built(method)
        load_state(optimizer, tmp_path / name / method)
        assert optimizer.updates == 2
