"""Names a library that is not installed as pip knows it."""


def missing_library(asked: str, library: str, otherwise: str = "") -> str:
    """Name a library that is not installed and how to install it.

    The name of an extra would be of no use: this package is installed from a checkout.

    Args:
        asked: What needs it.
        library: Its name for pip.
        otherwise: Another way out, as a clause.
    """
    return f"{asked} needs {library}, which is not installed; pip install {library}{otherwise and f', or {otherwise}'}"
