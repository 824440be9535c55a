"""Whether a model's weights still lie in the flat memory that DeepSpeed has laid them in and steps."""

from collections.abc import Iterable
from typing import Any

from slivertune.hift.piece import Weight


def check_flat_memory(optimizers: Iterable[Any], weights: Iterable[Weight]) -> None:
    """Refuse weights that lie elsewhere. Stages 1 and 2.

    Args:
        optimizers: DeepSpeed's ZeRO optimizers, of all groups.
        weights: What they step.

    Raises:
        RuntimeError: Naming one, the usual causes, and the way out.
    """
    flats = [flat for optimizer in optimizers for flat in optimizer.bit16_groups_flat]
    addresses = {flat.untyped_storage().data_ptr() for flat in flats}
    for weight in weights:
        if weight.parameter.untyped_storage().data_ptr() not in addresses:
            raise RuntimeError(
                f"{weight.name} lies in other memory than DeepSpeed has laid it in (model.to, or an assignment to "
                "its .data), and would never be trained; do that before slivertune.prepare or initialize, or copy "
                "the values: with torch.no_grad(): parameter.copy_(values)"
            )
