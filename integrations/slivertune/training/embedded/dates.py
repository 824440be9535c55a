"""Dates to write out: a task with one right answer per row, which the embedded model does not know."""

import random
from datetime import date, timedelta
from typing import Any

_FIRST, _LAST = date(1900, 1, 1), date(2099, 12, 31)
_NUM_TRAIN, _NUM_EVAL = 4096, 128
_SEED = 0
# calendar.month_name follows the locale.
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


def written_out(day: date) -> str:
    """Write a date as people do, such as "7 March 2031".

    Args:
        day: The date.
    """
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def date_splits() -> Any:
    """Draw dates from 1900 to 2099 by a fixed seed.

    Returns:
        A `datasets.DatasetDict` with 4,096 rows in `train` and 128 others in `eval`. The column `prompt` has a date as
        2031-03-07, and `response` has it written out.
    """
    import datasets

    num_days = (_LAST - _FIRST).days + 1
    drawn = random.Random(_SEED).sample(range(num_days), _NUM_TRAIN + _NUM_EVAL)
    days = [_FIRST + timedelta(days=number) for number in drawn]

    def rows(chosen: list[date]) -> Any:
        return datasets.Dataset.from_dict(
            {"prompt": [day.isoformat() for day in chosen], "response": [written_out(day) for day in chosen]}
        )

    return datasets.DatasetDict(train=rows(days[_NUM_EVAL:]), eval=rows(days[:_NUM_EVAL]))
