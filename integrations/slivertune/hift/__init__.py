"""HiFT: hierarchical full-parameter fine-tuning, one group of layers per step (arXiv 2401.15207)."""

from typing import TYPE_CHECKING

from slivertune.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from slivertune.hift.config import HiFTConfig
    from slivertune.hift.early_parking import park_for_hift
    from slivertune.hift.optimizer import HiFT
    from slivertune.hift.rotation import Group

__all__ = ["Group", "HiFT", "HiFTConfig", "park_for_hift"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Group": "slivertune.hift.rotation",
        "HiFT": "slivertune.hift.optimizer",
        "HiFTConfig": "slivertune.hift.config",
        "park_for_hift": "slivertune.hift.early_parking",
    },
)
