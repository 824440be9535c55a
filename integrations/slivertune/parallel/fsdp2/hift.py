"""HiFT on ranks that share the weights out (FSDP2, `fully_shard`).

Accelerate shares the model out while everything trains; then the rotation freezes and unfreezes the sharded parameters,
and each rank steps its own rows as plain local tensors, masters and state included. What FSDP2 fixes at the first
forward pass (the dtypes of mixed precision) it fixes in a warm-up at `prepare`, while everything trains; and what it
leaves gathered after a forward pass without a backward is put back after every step, because gathered weights would
keep the values and the frozen state of the step before.

A rank's memory: b P / N bytes of weights (b bytes a parameter, P parameters, N ranks), the active group's gradients
over N, two pieces of state, and what FSDP2 gathers to compute: the layers at work.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from slivertune.core.parameters import without_wrappers
from slivertune.hift import HiFT
from slivertune.parallel.checkpoint.sidecar import keep_sidecar
from slivertune.parallel.consistency.explain import compare_when_saving, explain, explain_saving
from slivertune.parallel.consistency.headers import Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat, check_agreement, guard
from slivertune.parallel.consistency.hift import ConsistencyCheck, sum_of_bits
from slivertune.parallel.consistency.processes import keeping_timeout
from slivertune.parallel.fsdp2.sharding import ShardedWeight, check_units, shard_of

_WARM_UP = "_slivertune_warm_up"


def prepare(accelerator: Any, model: nn.Module, hift: HiFT, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prepare a model, the HiFT that was built over it, loaders and schedulers.

    Args:
        accelerator: `accelerate.Accelerator` under FSDP2.
        model: The model.
        hift: Built over it.
        objects: As for `accelerator.prepare`.

    Returns:
        The prepared objects in the same order; the optimizer is accelerate's wrapper of HiFT.

    Raises:
        ValueError: If the base optimizer looks beyond single elements, the ranks were given other settings or weights,
            a unit holds the input embedding, or a trained parameter is not cut by rows.
    """
    check_units(accelerator, model)
    if not accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:  # else rank 0 alone holds weights, and sends them
        bits = {f"the bits of {name}": int(sum_of_bits(parameter)) for name, parameter in model.named_parameters()}
        check_agreement(bits)
    hift.use_sidecar("FSDP2")
    # Accelerate shards what the optimizer's param groups hold and puts the shards in their place; nothing else may
    # keep the whole weights alive.
    hift.release_parameters()
    with guard("sharing the weights out", computes=True), keeping_timeout():
        prepared: tuple[Any, ...] = tuple(accelerator.prepare(*objects))
    sharded = next(each for each in prepared if isinstance(each, nn.Module))
    warm_up(sharded)
    hift.rebind_parameters(sharded, shards_of(sharded, hift))
    consistency = ConsistencyCheck(hift, Heartbeat("hift"), with_weights=False, after_step=lambda: reshard(sharded))

    def meet() -> None:
        if not hift.is_detached:
            try:
                hift.check_model()
            except RuntimeError:
                # A forward without a backward, as of an evaluation, has left gathered weights in the place of shards.
                reshard(sharded)
                hift.check_model()
            consistency.meet(Stage.FORWARD)

    name_who_is_missing(accelerator, sharded, meet)
    explain_saving(accelerator)
    compare_when_saving(accelerator, consistency.compare)
    keep_sidecar(accelerator, hift)
    return prepared


def name_who_is_missing(accelerator: Any, model: nn.Module, meet: Callable[[], None]) -> None:
    """Let the error of a rank that has died, stays behind or is elsewhere say which.

    FSDP2's collectives are its own, in the midst of the passes: the ranks meet before each training forward pass, for
    a few numbers, and a collective that fails in a pass is explained.

    Args:
        accelerator: Its `backward` is overridden, on this instance.
        model: The sharded model. Its `forward` is overridden, on this instance.
        meet: Raises where the ranks are not at the same place. A collective.
    """

    def meet_in_training(module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            meet()

    model.register_forward_pre_hook(meet_in_training, prepend=True)
    explain(model, "forward", "in a forward pass")
    explain(accelerator, "backward", "in a backward pass")


def shards_of(model: nn.Module, hift: HiFT) -> dict[str, ShardedWeight]:
    """This rank's rows of everything that HiFT trains, by name.

    Raises:
        ValueError: If a parameter is gone, or not cut by rows.
    """
    param_group_of = {
        id(parameter): index for index, group in enumerate(hift.param_groups) for parameter in group["params"]
    }
    parameters = {without_wrappers(name): parameter for name, parameter in model.named_parameters()}
    shards = {}
    for name in (name for group in hift.groups for name in group.parameter_names):
        source = parameters.get(name)
        if source is None or id(source) not in param_group_of:
            raise ValueError(
                f"{name} is not among the parameters that FSDP2 shared out; prepare the model that HiFT was built "
                "over, and leave out what renames or replaces its parameters"
            )
        shards[name] = shard_of(name, source, param_group_of[id(source)])
    return shards


@torch.no_grad()
def warm_up(model: nn.Module) -> None:
    """Let FSDP2 make up its mind about dtypes while everything trains: what is frozen then could never train.

    It does so in the first forward pass of the root; this is one without any computation.

    Args:
        model: The root that `fully_shard` was applied to.
    """
    setattr(model, _WARM_UP, lambda nothing: None)
    register_fsdp_forward_method(model, _WARM_UP)
    try:
        getattr(model, _WARM_UP)(None)  # torch 2.11 can't move an empty list of arguments to a GPU
    finally:
        delattr(model, _WARM_UP)
    reshard(model)


def reshard(model: nn.Module) -> None:
    """Drop every gathered weight, so that the next forward pass gathers what the shards hold now."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
