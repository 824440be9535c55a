"""SFT under FSDP2: the frozen weights are sharded, and the layers add the deltas to the gathered weights."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slivertune.parallel.accelerate_internals import prepared_optimizers
from slivertune.parallel.consistency.explain import compare_when_saving
from slivertune.parallel.consistency.headers import Stage
from slivertune.parallel.consistency.heartbeat import guard
from slivertune.parallel.consistency.processes import keeping_timeout
from slivertune.parallel.fsdp2.hift import name_who_is_missing, reshard
from slivertune.parallel.fsdp2.sharding import check_units, first_row_of
from slivertune.parallel.objects import prepare_rest
from slivertune.parallel.sft.communicator import RankCommunicator, ShardedPretrainedValues
from slivertune.sft import SFT
from slivertune.sft.targets import Target


def prepare(accelerator: Any, model: nn.Module, sft: SFT, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prepare under FSDP2: accelerate shards the frozen model, but not the deltas.

    Args:
        accelerator: `accelerate.Accelerator`.
        model: The model.
        sft: SFT built over the model, in either form; it is in the layer form afterwards.
        objects: All objects to prepare, including the model and SFT.

    Returns:
        The prepared objects in the same order; the optimizer is in accelerate's wrapper.

    Raises:
        ValueError: If the settings differ between ranks, a trained tensor is not the weight of a plain linear layer, or
            a unit holds the input embedding.
    """
    check_units(accelerator, model)
    communicator = RankCommunicator(lambda: bool(accelerator.sync_gradients))

    def pretrained(target: Target) -> ShardedPretrainedValues:
        return _Rows(target, accelerator.device, prepared)

    with sft.rebinding_parameters(communicator, in_layers=True, pretrained=pretrained):
        # Accelerate refuses to shard a model without an optimizer, so it gets a temporary one.
        with guard("sharding the weights", computes=True), keeping_timeout():
            prepared, placeholder = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        prepared_optimizers(accelerator).remove(placeholder)
    communicator.keep_together(sft)
    name_who_is_missing(accelerator, prepared, lambda: communicator.meet(Stage.FORWARD))
    compare_when_saving(accelerator, sft, communicator.compare_all)
    sft.use_sidecar()
    return prepare_rest(accelerator, model, prepared, sft, objects)


class _Rows(ShardedPretrainedValues):
    """A parameter that FSDP2 shards by rows."""

    def __init__(self, target: Target, device: torch.device, model: nn.Module) -> None:
        super().__init__(target, device)
        self._model = model

    def own(self) -> tuple[torch.Tensor, int]:
        """Return this rank's rows, flattened, and the position of their first element."""
        parameter = self._sharded()
        first = first_row_of(parameter) * (parameter.numel() // parameter.shape[0])
        return parameter.detach().to_local().view(-1), first

    def whole(self) -> torch.Tensor:
        """Gather the whole tensor on every rank. A collective."""
        with guard(f"gathering {self._target.name}", computes=True):
            whole: torch.Tensor = self._sharded().detach().full_tensor()
        return whole

    def _sharded(self) -> Any:
        if not isinstance(self._target.parameter, DTensor):
            # After a forward without a backward, some modules still hold gathered weights.
            reshard(self._model)
        parameter = self._target.parameter
        placements: Any = getattr(parameter, "placements", ())
        if len(placements) != 1 or not placements[0].is_shard(0):
            raise ValueError(
                f"{self._target.name} is placed as {placements or 'no DTensor'}, and SFT reads only weights that are "
                "sharded by rows over one dimension of ranks. Leave out replicas (HSDP), other placements and "
                "ignored_modules"
            )
        return parameter
