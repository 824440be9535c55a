"""`slivertune compare`: trains all rows and reports their results."""

import os
from collections.abc import Sequence
from dataclasses import replace

from slivertune.core.masking import masked
from slivertune.planning.plot import require_matplotlib, save
from slivertune.training.comparison.arguments import CompareArguments, parse_compare_arguments
from slivertune.training.comparison.comparison import TRAIN_PROGRAM, Comparison, as_json
from slivertune.training.comparison.figure import comparison_figure
from slivertune.training.comparison.record import Record
from slivertune.training.comparison.table import comparison_table, notes
from slivertune.training.display import make_console, one_voice
from slivertune.training.output.report import platform_versions

PICTURE_NAME = "compare.png"


def run_compare(argv: Sequence[str], *, program: Sequence[str] = TRAIN_PROGRAM) -> None:
    """Run `slivertune compare`.

    Args:
        argv: Words after `slivertune compare`.
        program: Command that starts a run; see `Comparison`.

    Raises:
        ValueError: If the arguments contradict each other, or if the folder has another comparison.
        RuntimeError: If a run failed. The other runs are complete.
    """
    arguments = parse_compare_arguments(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare starts its runs by itself, each on one device. Start it without a launcher")
    console = make_console()
    with one_voice(console):
        record = Record(arguments.folder)
        comparison = Comparison(
            arguments, record, console, lambda line: console.print(masked(line), markup=False), program
        )
        results = comparison.run()
        title = _title(arguments, comparison.amount)
        remarks = masked(notes(results, is_searched=arguments.rates is not None))
        record.describe(
            {
                "title": title,
                "common": list(arguments.common),
                "rows": [as_json(each) for each in results],
                "notes": remarks,
                "versions": platform_versions(),
            }
        )
        console.print()
        console.print(comparison_table(results, title))
        for remark in remarks:
            console.print(f"note: {remark}", markup=False)
        console.print(f"figures  {record.path}", markup=False, soft_wrap=True)
        if any(each.outcomes for each in results):
            picture = arguments.folder / PICTURE_NAME
            try:
                require_matplotlib("a picture of the comparison")
                save(comparison_figure(results, title), picture)
                console.print(f"picture  {picture}", markup=False, soft_wrap=True)
            except ImportError as error:
                console.print(f"note: no {PICTURE_NAME}: {error}", markup=False)
    failed = [each.row.name for each in results if each.failure]
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(results)} rows failed: {', '.join(failed)}. See the notes above, and run "
            "the same command again"
        )


def _title(arguments: CompareArguments, amount: float | None) -> str:
    budget = arguments.budget
    text = f"equal {replace(budget, amount=amount).describe()}"
    return text if budget.amount is not None or budget.length == "steps" else f"{text}, as the first row took"
