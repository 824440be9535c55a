"""TokenTune: only selected tokens keep activations and carry a gradient.

"Memory-Efficient Fine-Tuning of Transformers via Token Selection", arXiv 2501.18824.
"""

from slivertune.tokentune.config import TokenTune
from slivertune.tokentune.hook import TokenTuneHandle
from slivertune.tokentune.quality import GradientQuality, QualityRow, gradient_quality

__all__ = ["GradientQuality", "QualityRow", "TokenTune", "TokenTuneHandle", "gradient_quality"]
