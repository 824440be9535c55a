"""Park a model's weights as HiFT will, before the model is moved to a device that has no room for all of them."""

from torch import nn
from typing_extensions import override

from slivertune.core.layers import find_blocks
from slivertune.core.module_hook import ModelHandle
from slivertune.hift.config import HiFTConfig
from slivertune.parked.kept_on_host import keep_blocks_on_host
from slivertune.parked.quantized_layers import QuantizedLayers, linear_modules


class ParkedForHiFT(ModelHandle):
    """Handle of weights that wait for HiFT, made by `park_for_hift`. `remove()` restores the exact weights.

    Args:
        model: Model in host memory.
        config: Settings of HiFT.
    """

    refusal_to_copy = "a handle belongs to one model. Call park_for_hift for the copy of the model, too"

    def __init__(self, model: nn.Module, config: HiFTConfig) -> None:
        super().__init__()
        self._quantized: QuantizedLayers | None = None
        if config.waiting is not None:
            layers = linear_modules(model, [block for _, block in find_blocks(model)])
            self._quantized = QuantizedLayers(model, layers, config.waiting)
            self._quantized.attach()
        try:
            if config.weights == "host":
                self.on_remove(keep_blocks_on_host(model).remove)
        except BaseException:
            self.remove()
            raise

    @override
    def remove(self) -> None:
        """Restore the exact weights, and let the model move as any other.

        If the device has no room for them, the layers stay quantised, a warning says so, and a later call tries again.
        """
        super().remove()
        if self._quantized is not None:
            self._quantized.remove()


def park_for_hift(model: nn.Module, config: HiFTConfig) -> ParkedForHiFT:
    """Park a model's weights before it is moved to a device that has no room for all of them.

    A Trainer moves its model when it is built, before HiFT exists. Load the model in host memory, call this, then move
    the model, or give it to a Trainer, and build HiFT with the same settings, which takes over from here. With
    `waiting`, the linear weights of blocks move as codes, and the exact ones stay on the host. With `weights="host"`,
    blocks stay on the host, casts (`model.bfloat16()`) are made there, and the model can't run until HiFT is built.

    Args:
        model: Model in bf16 or fp32, in host memory. With `weights="device"` it may be on a device.
        config: Settings of HiFT, with `waiting`, `weights="host"`, or both.

    Returns:
        Handle. `remove()` restores the exact weights, before HiFT is built or after its `detach()`. It is also a
        context manager.

    Raises:
        ImportError: If the library of the codes is not installed.
        ValueError: If the settings park nothing, or a weight can't be parked, with its name and the way out.

    Example:
        >>> config = slivertune.HiFTConfig(waiting="nf4", weights="host")
        >>> model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        >>> slivertune.park_for_hift(model, config)
        >>> trainer = Trainer(model, ...)
        >>> slivertune.attach(trainer, config)
    """
    if not config.parks:
        raise ValueError(
            "waiting=None and weights='device' leave all weights as they are. Set waiting='int8' or 'nf4', or "
            "weights='host', or leave out park_for_hift"
        )
    return ParkedForHiFT(model, config)
