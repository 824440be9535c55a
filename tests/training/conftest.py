"""What makes tests of runs and of their options quick, and changes nothing of what they see."""

import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Let files reach the disk when they may: no test cuts the power, and waiting takes a sixth of a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # as picky about what is no open file
        yield


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_searched() -> None:
    """Keep the garbage collector, which each training calls, from what modules before have imported and kept."""
    gc.collect()
    gc.freeze()


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
