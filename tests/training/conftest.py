"""Make tests of options quick, without a change to the values that they read."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def parsers_made_once() -> Iterator[None]:
    """For hundreds of command lines: make the parser of each verb, and the table of options, for the first of them."""
    from slivertune.training.options import parser

    table, make = functools.cache(parser.train_options), parser.make_parser
    made: dict[str, Any] = {}

    def parser_of(verb: parser.Verb = parser.TRAIN) -> Any:
        if verb.name not in made:
            made[verb.name] = make(verb)
        return made[verb.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser, "train_options", lambda: dict(table()))
        patch.setattr(parser, "make_parser", parser_of)
        yield
