"""Settings of a method as another library's config file has them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from slivertune.core.removed_settings import say_removed
from slivertune.core.suggestions import did_you_mean


def make_setting(kind: type[Any], fields: Mapping[str, Any], place: str, *, others: tuple[str, ...] = ()) -> Any:
    """Make a settings object from fields of a config file.

    Args:
        kind: Dataclass of the settings.
        fields: Values by name of the field.
        place: Place of the fields in the config file, for errors.
        others: Further names that the place takes, for suggestions.

    Raises:
        ValueError: If a name is no field of it, or a value is out of its field's range.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for field in fields:
        if field not in known:
            ending = (
                say_removed(str(field))
                or did_you_mean(str(field), [*known, *others])
                or f". Use {', '.join([*known, *others])}"
            )
            raise ValueError(f"{place}: {field} is no field of {kind.__name__}{ending}")
    return kind(**fields)
