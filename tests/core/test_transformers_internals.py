from datetime import date, datetime

import pytest

from slivertune.core.transformers_internals import template_date, today_in_templates
from tests.training.tiny import chat_tokenizer

DATED = "{% macro day() %}{{ strftime_now('%Y-%m-%d %H:%M') }}{% endmacro %}{{ day() }}"


def written() -> str:
    return str(chat_tokenizer(DATED).apply_chat_template([{"role": "user", "content": ""}], tokenize=False))


def test_a_template_writes_the_date_that_it_is_given_and_afterwards_the_days_again() -> None:
    with template_date(DATED, date(2024, 2, 29)):
        assert written() == "2024-02-29 00:00"
    now = datetime.strptime(written(), "%Y-%m-%d %H:%M")
    with template_date(DATED, None):
        assert datetime.strptime(written(), "%Y-%m-%d %H:%M") >= now
    assert today_in_templates() >= now.date()


def test_an_error_inside_leaves_the_date_as_it_was() -> None:
    with pytest.raises(KeyError), template_date(DATED, date(2024, 2, 29)):
        raise KeyError
    assert written() != "2024-02-29 00:00"
