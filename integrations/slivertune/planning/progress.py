"""Progress of plans on a terminal: a bar that says how many are ready, if their number is known."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class PlanProgress:
    """Bar of the plans of one answer.

    Args:
        bar: Bars on the terminal.
        task: The bar.
    """

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def show(self, done: int, total: int) -> str:
        """Show the number of plans that are ready.

        Args:
            done: Plans that are ready.
            total: Plans in all.

        Returns:
            The numbers in words, such as "3 of 16".
        """
        numbers = f"{done} of {total}"
        self._bar.update(self._task, completed=done, total=total, description=f"planning, {numbers}")
        return numbers


@contextmanager
def showing_progress(console: Console) -> Iterator[PlanProgress]:
    """Show that plans are being made until the context ends. Lines that are printed meanwhile stay above the bar.

    Args:
        console: Console; one that is no terminal shows nothing.
    """
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield PlanProgress(bar, bar.add_task("planning", total=None))
