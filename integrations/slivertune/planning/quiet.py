"""Redirection of library output while a plan is made, so that standard output has only the plan's answer."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import transformers


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Reserve standard output for the answer, and hold back library logs about a model that will never run."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # bitsandbytes warns about a CPU kernel that a plan never calls.
    bitsandbytes = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = bitsandbytes.level
    bitsandbytes.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
            yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
        bitsandbytes.setLevel(level)
