"""Paths as users write them."""

from pathlib import Path


def user_path(text: str | Path) -> Path:
    """Return a path with `~` replaced by the home folder.

    Args:
        text: Path as written.

    Raises:
        ValueError: If it begins with the home folder of an unknown user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{text}: there is no user with this home folder. Write the path without ~") from error
