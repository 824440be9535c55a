"""FSDP2's shards: rows of a weight on each rank, and units, the modules that FSDP2 gathers as one."""

from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from typing_extensions import override

from slivertune.hift.chunk import Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedWeight(Weight):
    """Rows of a weight: `parameter` is a plain tensor in this rank's memory of `trained`, a DTensor sharded by rows."""

    first_row: int
    """Index of this rank's first row in the whole weight. If this rank has none, it is the weight's number of rows."""

    @property
    @override
    def first_element(self) -> int:
        return self.first_row * self.trained.shape[1:].numel()

    @override
    def take_gradient(self) -> None:
        self.follow()
        gradient: Any = self.trained.grad
        self.parameter.grad = None if gradient is None else gradient.to_local()

    def follow(self) -> None:
        """Point `parameter` to the current memory of `trained`, which FSDP2 and loaders may have replaced."""
        self.parameter.data = cast(Any, self.trained).detach().to_local()


def shard_of(name: str, source: nn.Parameter, param_group: int) -> ShardedWeight:
    """Return the rows of a parameter that this rank holds.

    Args:
        name: Name of the weight in the model before sharding.
        source: The DTensor.
        param_group: Index of the param group that holds its hyperparameters.

    Raises:
        ValueError: If it is not sharded by rows over one dimension of ranks.
    """
    placements: Any = getattr(source, "placements", None)
    if placements is None:
        raise ValueError(f"{name} was not sharded by FSDP2. Leave it out of ignored_modules, or freeze it")
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise ValueError(
            f"{name} is placed as {placements}, and HiFT trains only parameters that are sharded by rows over one "
            "dimension of ranks. Leave out replicas (HSDP) and other placements"
        )
    local = nn.Parameter(cast(Any, source).detach().to_local(), requires_grad=False)
    return ShardedWeight(
        name=name, parameter=local, trained=source, param_group=param_group, first_row=first_row_of(source)
    )


def first_row_of(source: Any) -> int:
    """Compute the index of this rank's first row of a DTensor sharded by rows. Return its number of rows for none."""
    rows_a_rank = -(-source.shape[0] // source.device_mesh.size())
    return int(min(source.device_mesh.get_local_rank() * rows_a_rank, source.shape[0]))


def check_units(accelerator: Any, model: nn.Module) -> None:
    """Refuse units that hold the input embedding, which accelerate later makes a unit of its own.

    Accelerate 1.15 then fails deep inside torch. If its configuration names no classes, accelerate uses the model's
    `_no_split_modules`; transformers' encoders list a class there that holds the embedding (`RobertaEmbeddings`).

    Args:
        accelerator: `accelerate.Accelerator` under FSDP2.
        model: The model before sharding.

    Raises:
        ValueError: If there is such a unit; names the setting and its value.
    """
    named = accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap
    classes = list(getattr(model, "_no_split_modules", None) or ()) if named is None else list(named)
    bottom = getattr(model, "get_input_embeddings", lambda: None)()
    parents = {
        type(module).__name__
        for module in model.modules()
        if type(module).__name__ in classes and any(each is bottom for each in module.modules())
    }
    if parents:
        present = {type(module).__name__ for module in model.modules()}
        blocks = ",".join(each for each in classes if each in present - parents)
        raise ValueError(
            f"{', '.join(sorted(parents))} holds the input embedding, which accelerate gathers on its own under FSDP2. "
            f"Set fsdp_transformer_layer_cls_to_wrap: {blocks} in the fsdp_config of your configuration"
        )
