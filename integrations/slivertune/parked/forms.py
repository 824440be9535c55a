"""Forms and places of weights that do not train now."""

from typing import Literal

CodesForm = Literal["int8", "nf4"]
"""Kinds of codes that stand for a weight."""
WeightForm = Literal["exact", "int8", "nf4"]
WeightPlace = Literal["device", "host"]
