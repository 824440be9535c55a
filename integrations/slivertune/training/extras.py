"""Libraries that only some settings need, and how to install them."""

from __future__ import annotations

import importlib.util

_EXTRA_OF_MODULE = {"peft": "peft", "bitsandbytes": "bitsandbytes"}


def require(module: str, setting: str) -> None:
    """Say how to install a library that is not there, before anything is loaded.

    Args:
        module: The library's module, which has an extra of this package.
        setting: What needs it, as typed.

    Raises:
        ImportError: If it is not installed, naming the extra.
    """
    if importlib.util.find_spec(module) is None:
        extra = _EXTRA_OF_MODULE[module]
        raise ImportError(f"{setting} needs {module}, which is not installed; pip install 'slivertune[{extra}]'")
