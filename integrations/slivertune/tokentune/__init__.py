"""TokenTune: only selected tokens keep activations and carry a gradient.

"Memory-Efficient Fine-Tuning of Transformers via Token Selection", arXiv 2501.18824.
"""

from typing import TYPE_CHECKING

from slivertune.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from slivertune.tokentune.config import TokenTune
    from slivertune.tokentune.hook import TokenTuneHandle
    from slivertune.tokentune.quality import GradientQuality, QualityRow, gradient_quality

__all__ = ["GradientQuality", "QualityRow", "TokenTune", "TokenTuneHandle", "gradient_quality"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "TokenTune": "slivertune.tokentune.config",
        "TokenTuneHandle": "slivertune.tokentune.hook",
        **dict.fromkeys(("GradientQuality", "QualityRow", "gradient_quality"), "slivertune.tokentune.quality"),
    },
)
