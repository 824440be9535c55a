"""Name a library that is not installed, as pip knows it."""


def missing_library(asked: str, library: str, otherwise: str = "") -> str:
    """Name a library that is not installed and how to install it.

    The name of an extra would not help, since this package is installed from a checkout.

    Args:
        asked: Feature that needs the library.
        library: Name of the library for pip.
        otherwise: Another way out, as a clause.
    """
    return f"{asked} needs {library}, which is missing. Run pip install {library}{otherwise and f', or {otherwise}'}"
