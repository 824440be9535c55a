"""Comparison of the gradient of selected tokens with the dense one, for choosing a ratio and a pattern."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

from slivertune.core.atomic import atomic_file
from slivertune.core.missing_library import missing_library
from slivertune.tokentune.config import Pattern, TokenTune
from slivertune.tokentune.hook import find_model


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityRow:
    """A ratio and a pattern, compared with the dense gradient of the same batches."""

    pattern: Pattern
    """Pattern of the selected positions."""
    ratio: float
    """Selected share of each sequence."""
    cosine: float
    """Mean cosine between the gradients of all draws and the dense one, over all trainable parameters. A draw without
    any gradient counts as 0."""
    cosine_deviation: float
    """Standard deviation of the cosine over batches and draws (0 for a single one)."""
    norm_ratio: float
    """Mean ratio of a draw's gradient norm to the norm of the dense gradient, over all draws."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientQuality:
    """Result of `gradient_quality`."""

    rows: tuple[QualityRow, ...]
    """Results for each pattern and ratio, in the given order."""
    num_draws: int
    """Number of draws per row."""

    def table(self) -> str:
        """Return the rows as text, one line each under a heading."""
        lines = [f"{'pattern':10}{'ratio':>7}{'cosine':>16}{'norm / dense':>14}"]
        for row in self.rows:
            cosine = f"{row.cosine:.3f} ± {row.cosine_deviation:.3f}"
            lines.append(f"{row.pattern:10}{row.ratio:7.2f}{cosine:>16}{row.norm_ratio:14.3f}")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> Path:
        """Draw cosine and norm ratio against the ratio, with one line per pattern.

        Args:
            path: Output file, such as quality.png; its suffix sets the format. It appears whole or not at all.

        Returns:
            The path.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(missing_library("the plot", "matplotlib")) from error
        figure = Figure(figsize=(9, 4), layout="constrained")
        panels: Any = figure.subplots(1, 2)
        titles = {"cosine": "cosine to the dense gradient", "norm_ratio": "norm / dense norm"}
        for axes, (name, title) in zip(panels, titles.items(), strict=True):
            for pattern in dict.fromkeys(row.pattern for row in self.rows):
                rows = sorted((row for row in self.rows if row.pattern == pattern), key=lambda row: row.ratio)
                spread = [row.cosine_deviation for row in rows] if name == "cosine" else None
                values = [getattr(row, name) for row in rows]
                axes.errorbar([row.ratio for row in rows], values, spread, marker="o", capsize=3, label=pattern)
            axes.set(title=title, xlabel="share of selected tokens")
            axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        panels[0].legend()
        path = Path(path)
        with atomic_file(path) as temporary:
            figure.savefig(temporary, dpi=150)
        return path


def gradient_quality(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    ratios: Sequence[float] = (0.5, 0.3, 0.2, 0.1),
    patterns: Sequence[Pattern] = ("random", "chunks", "block"),
    *,
    num_draws: int = 4,
    chunk_size: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> GradientQuality:
    """Compare gradients of selected tokens with dense ones, without training and without dropout.

    It takes the memory of dense training without an optimizer, plus two more gradients. Afterwards the model's weights,
    gradients and modes are as before.

    Args:
        model: Model as for `TokenTune.attach`, not hooked.
        batches: Arguments of the model's forward, labels included, on its device.
        ratios: Selected shares, each in (0, 1].
        patterns: Patterns to try with each ratio.
        num_draws: Number of draws per batch, ratio and pattern.
        chunk_size: Positions in a chunk.
        seed: Seed of the draws.
        progress: Whether to show a progress bar.

    Returns:
        Rows, with a table and a plot.

    Raises:
        ValueError: If there is no batch, no ratio or no pattern, if one is out of its range, if nothing is trainable,
            or if a batch has no dense gradient.

    Example:
        >>> quality = gradient_quality(model, batches, ratios=(0.5, 0.3, 0.1))
        >>> print(quality.table())
    """
    settings = [(pattern, ratio) for pattern in patterns for ratio in ratios]
    known = list(batches)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for name, given in (("batches", known), ("ratios and patterns", settings), ("trainable parameters", parameters)):
        if not given:
            raise ValueError(f"there are no {name} to compare gradients with. Give at least one")
    if num_draws < 1:
        raise ValueError(f"num_draws={num_draws} must be at least 1")
    tunes = [TokenTune(ratio=r, pattern=p, chunk_size=chunk_size, seed=seed) for p, r in settings]
    cosines: list[list[float]] = [[] for _ in settings]
    norms: list[list[float]] = [[] for _ in settings]
    with _without_dropout(model), Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("gradients", total=len(known) * (1 + len(settings) * num_draws))
        for index, batch in enumerate(known):
            dense = _gradient(model, parameters, batch)
            dense_norm = math.sqrt(_dot(dense, dense))
            if not dense_norm > 0:
                raise ValueError(f"the dense gradient of batch {index} has norm {dense_norm}. Give batches with labels")
            bar.advance(task)
            for which, tune in enumerate(tunes):
                with tune.attach(model) as handle:
                    handle.num_draws = index * num_draws
                    for _ in range(num_draws):
                        drawn = _gradient(model, parameters, batch)
                        norm = math.sqrt(_dot(drawn, drawn))
                        cosines[which].append(_dot(dense, drawn) / (dense_norm * norm) if norm else 0.0)
                        norms[which].append(norm / dense_norm)
                        bar.advance(task)
    rows = tuple(
        QualityRow(
            pattern=pattern,
            ratio=ratio,
            cosine=statistics.fmean(cosines[which]),
            cosine_deviation=statistics.stdev(cosines[which]) if len(cosines[which]) > 1 else 0.0,
            norm_ratio=statistics.fmean(norms[which]),
        )
        for which, (pattern, ratio) in enumerate(settings)
    )
    return GradientQuality(rows=rows, num_draws=len(known) * num_draws)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, except the one that decides whether the model is hooked."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        find_model(model).training = True
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _gradient(
    model: nn.Module, parameters: Sequence[nn.Parameter], batch: Mapping[str, Any]
) -> list[torch.Tensor | None]:
    with torch.enable_grad():
        return list(torch.autograd.grad(model(**batch).loss, parameters, allow_unused=True))


def _dot(left: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]) -> float:
    pairs = ((a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None)
    return sum(float((a.double() * b.double()).sum()) for a, b in pairs)
