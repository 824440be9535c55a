"""The embedded default, as a run uses it: the base model with a progress bar, and the language reference as rows."""

from pathlib import Path
from typing import Any

import datasets
from rich.console import Console
from rich.progress import Progress

from slivertune.core.manifest import find_damage
from slivertune.training.embedded.base_model import BaseRecipe, StepReport, base_model_folder, ensure_base_model
from slivertune.training.embedded.corpus import language_reference
from slivertune.training.output.display import make_progress

NUM_LINES = 5
"""How often the loss is said while the base model is trained."""


def prepare_base_model(recipe: BaseRecipe, console: Console, *, bar: bool) -> Path:
    """Find or train the base model, and show which.

    Args:
        recipe: What the model is.
        console: Where to write.
        bar: Whether to draw a progress bar.

    Returns:
        The folder of the model and its tokenizer.

    Raises:
        RuntimeError: If this Python has nothing to train it on.
    """
    folder = base_model_folder(recipe)
    damage = find_damage(folder) if folder.is_dir() else None
    if folder.is_dir() and damage is None:
        console.print(f"base model: {folder}, made before", highlight=False, soft_wrap=True)
        return folder
    if damage is not None:
        console.print(f"base model: {folder} is damaged ({damage}) and is made again", highlight=False, soft_wrap=True)
    console.print(
        f"base model: training it on the docstrings of Python's standard library, {recipe.num_steps} updates; it is "
        f"kept in {folder} for later runs",
        highlight=False,
        soft_wrap=True,
    )
    with make_progress(console, enabled=bar) as progress:
        return ensure_base_model(recipe, report=_report(progress, recipe.num_steps))


def reference_splits() -> Any:
    """The Python language reference.

    Returns:
        A `datasets.DatasetDict` with `train` and `eval`, one topic a row in the column `text`.

    Raises:
        RuntimeError: If this Python comes without it.
    """
    train, evaluation = language_reference()
    return datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": train}), eval=datasets.Dataset.from_dict({"text": evaluation})
    )


def _report(progress: Progress, num_steps: int) -> StepReport:
    task = progress.add_task("base model", total=num_steps)

    def report(step: int, loss: float) -> None:
        progress.update(task, completed=step)
        if step % max(1, num_steps // NUM_LINES) == 0:
            progress.console.print(f"step {step:>4}/{num_steps}  loss {loss:.3f}", highlight=False)

    return report
