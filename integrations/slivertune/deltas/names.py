"""Lookup of a tensor's name among names with another prefix, or with a wrapper inside. Pure."""

from collections.abc import Container, Iterable

from slivertune.core.parameters import WRAPPERS, without_wrappers

_WRAPPERS = WRAPPERS | {"_fsdp_wrapped_module", "base_layer"}
"""Wrappers' names, including those of FSDP and PEFT."""


def name_before(name: str, known: Container[str]) -> str:
    """Return a parameter's name from before checkpointing or torch.compile wrapped a module around it.

    Args:
        name: Present name of the parameter.
        known: Names from before; one of them is returned unchanged.
    """
    return name if name in known else without_wrappers(name)


class NameIndex:
    """Index of names for lookups.

    Args:
        names: The names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._exact = set(names)
        self._names: dict[str, list[str]] = {}
        for name in self._exact:
            self._names.setdefault(_bare(name), []).append(name)

    def find(self, name: str) -> str | None:
        """Find a name: unchanged, without some leading parts, or with additional ones.

        Args:
            name: The name to find, such as `module.model.layers.0.mlp.up_proj.weight`.

        Returns:
            The name in this index; None if there is no such name, or more than one.
        """
        if name in self._exact:
            return name
        bare = _bare(name)
        parts = bare.split(".")
        # At least the names of module and parameter: `weight` alone would match any module.
        for start in range(max(1, len(parts) - 1)):
            if matches := self._names.get(".".join(parts[start:])):
                return matches[0] if len(matches) == 1 else None
        longer = [full for other, names in self._names.items() if other.endswith(f".{bare}") for full in names]
        return longer[0] if len(longer) == 1 else None


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
