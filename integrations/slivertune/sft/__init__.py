"""SFT: sparse fine-tuning with dropping and growth of weights (arXiv 2401.16405)."""

from typing import TYPE_CHECKING

from slivertune.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from slivertune.sft.config import SFTConfig
    from slivertune.sft.optimizer import SFT

__all__ = ["SFT", "SFTConfig"]

__getattr__, __dir__ = lazy_names(__name__, {"SFT": "slivertune.sft.optimizer", "SFTConfig": "slivertune.sft.config"})
