"""Names of a package that are imported on first use (PEP 562), so that its settings can be read without torch."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, module_of_name: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the functions `__getattr__` and `__dir__` of a package.

    Args:
        package: Name of the package.
        module_of_name: Module of each public name.

    Returns:
        `__getattr__`, which imports a name once and raises AttributeError for others, and `__dir__`, which lists the
        names that are not imported yet as well.
    """
    namespace = vars(sys.modules[package])

    def get_attribute(name: str) -> Any:
        if name not in module_of_name:
            names = ", ".join(namespace["__all__"])
            raise AttributeError(f"module {package!r} has no attribute {name!r}; public names: {names}")
        namespace[name] = value = getattr(importlib.import_module(module_of_name[name]), name)
        return value

    def list_names() -> list[str]:
        return sorted({*namespace, *module_of_name})

    return get_attribute, list_names
