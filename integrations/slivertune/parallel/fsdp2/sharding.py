"""What FSDP2 shares out: a weight of which every rank holds some rows, and the modules that it gathers as one."""

from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from typing_extensions import override

from slivertune.hift.piece import Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedWeight(Weight):
    """Rows of a weight: `parameter` is a plain tensor on this rank's memory of `trained`, a DTensor cut by rows."""

    first_row: int
    """Of the whole weight, where this rank's rows begin; its number of rows if this rank has none."""

    @override
    def take_gradient(self) -> None:
        self.follow()
        gradient: Any = self.trained.grad
        # Handed on, so that it is freed as soon as its last piece is stepped.
        self.trained.grad = None
        self.parameter.grad = None if gradient is None else gradient.to_local()

    def follow(self) -> None:
        """Lie on the memory that `trained` has now; FSDP2 and loaders may have replaced it."""
        self.parameter.data = cast(Any, self.trained).detach().to_local()


def shard_of(name: str, source: nn.Parameter, param_group: int) -> ShardedWeight:
    """The rows of a parameter that this rank holds.

    Args:
        name: The weight's name in the model before it was shared out.
        source: The DTensor.
        param_group: Index of the param group that holds its hyperparameters.

    Raises:
        ValueError: If it is cut any other way than by rows over one dimension of ranks.
    """
    placements: Any = getattr(source, "placements", None)
    if placements is None:
        raise ValueError(f"{name} was not shared out by FSDP2; leave it out of ignored_modules, or freeze it")
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise ValueError(
            f"{name} is placed as {placements}, but HiFT trains parameters that are cut by rows over one dimension of "
            "ranks; leave out replicas (HSDP) and other placements"
        )
    local = nn.Parameter(cast(Any, source).detach().to_local(), requires_grad=False)
    return ShardedWeight(
        name=name, parameter=local, trained=source, param_group=param_group, first_row=first_row_of(source)
    )


def first_row_of(source: Any) -> int:
    """Where this rank's rows begin in a DTensor that is cut by rows; its number of rows if this rank has none."""
    rows_a_rank = -(-source.shape[0] // source.device_mesh.size())
    return int(min(source.device_mesh.get_local_rank() * rows_a_rank, source.shape[0]))


def check_units(accelerator: Any, model: nn.Module) -> None:
    """Refuse units that hold the input embedding, which accelerate makes a unit of its own afterwards.

    Accelerate 1.15 then fails deep inside of torch. The encoders of transformers name such a module among those that
    are not to be split (`RobertaEmbeddings`), and accelerate takes these where its configuration names none.

    Args:
        accelerator: `accelerate.Accelerator` under FSDP2.
        model: The model, not yet cut.

    Raises:
        ValueError: Naming the setting and its value.
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
            f"{', '.join(sorted(parents))} holds the input embedding, which accelerate gathers on its own under FSDP2; "
            f"set fsdp_transformer_layer_cls_to_wrap: {blocks} in the fsdp_config of your configuration"
        )
