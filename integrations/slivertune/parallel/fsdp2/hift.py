"""HiFT on ranks that shard the weights (FSDP2, `fully_shard`).

Accelerate shards the model while all parameters train. Then the rotation freezes and unfreezes the sharded parameters,
and each rank steps its own rows as plain local tensors, with their masters and state. FSDP2 fixes the dtypes of mixed
precision at the first forward pass; a warm-up at `prepare` runs it while all parameters train. A forward pass without a
backward leaves weights gathered, with old values and an old frozen state, so every step reshards them.

Memory per rank: b P / N bytes of weights (b bytes per parameter, P parameters, N ranks), the active group's gradients
divided by N, two chunks of state, and the layers that FSDP2 gathers to compute.
"""

import weakref
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
        hift: HiFT built over the model.
        objects: As for `accelerator.prepare`.

    Returns:
        The prepared objects in the same order; the optimizer is in accelerate's wrapper.

    Raises:
        ValueError: If the base optimizer is not elementwise, the settings or weights differ between ranks, a unit holds
            the input embedding, a trained parameter is not sharded by rows, or `master="stochastic"` meets mixed
            precision.
    """
    if hift.config.master == "stochastic" and accelerator.mixed_precision != "no":
        raise ValueError(
            f"master='stochastic' rounds weights to bf16, and with mixed_precision='{accelerator.mixed_precision}' "
            "accelerate casts sharded weights to fp32. Set mixed_precision='no'"
        )
    check_units(accelerator, model)
    if not accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:  # with it, only rank 0 has weights, and sends them
        bits = {f"the bits of {name}": int(sum_of_bits(parameter)) for name, parameter in model.named_parameters()}
        check_agreement(bits)
    hift.use_sidecar("FSDP2")
    # Accelerate shards the parameters in the optimizer's param groups and replaces them by the shards; nothing else
    # may keep the whole weights alive.
    hift.release_parameters()
    with guard("sharding the weights", computes=True), keeping_timeout():
        prepared: tuple[Any, ...] = tuple(accelerator.prepare(*objects))
    sharded = next(each for each in prepared if isinstance(each, nn.Module))
    warm_up(sharded)
    hift.rebind_parameters(sharded, shards_of(sharded, hift))
    consistency = ConsistencyCheck(hift, Heartbeat("hift"), with_weights=False, after_step=lambda: reshard(sharded))

    # The model's hooks don't keep them alive: HiFT comes off the model when the user drops it.
    held, checked = weakref.ref(hift), weakref.proxy(consistency)

    def meet() -> None:
        own = held()
        if own is not None and not own.is_detached:
            try:
                own.turns.hooks.check()
            except RuntimeError:
                # A forward without a backward, as in evaluation, has left gathered weights in place of the shards.
                reshard(sharded)
                own.turns.hooks.check()
            checked.meet(Stage.FORWARD)

    name_who_is_missing(accelerator, sharded, meet)
    explain_saving(accelerator)
    compare_when_saving(accelerator, hift, consistency.compare)
    keep_sidecar(accelerator, hift)
    return prepared


def name_who_is_missing(accelerator: Any, model: nn.Module, meet: Callable[[], None]) -> None:
    """Let errors name a rank that has died, falls behind or is at another position.

    FSDP2 runs its own collectives inside the passes. The ranks therefore compare a few numbers before each training
    forward pass, and a collective that fails in a pass is explained.

    Args:
        accelerator: Its `backward` is overridden on this instance.
        model: The sharded model. Its `forward` is overridden on this instance.
        meet: Raises if the ranks' positions differ. A collective.
    """

    def meet_in_training(module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            meet()

    model.register_forward_pre_hook(meet_in_training, prepend=True)
    explain(model, "forward", "in a forward pass")
    explain(accelerator, "backward", "in a backward pass")


def shards_of(model: nn.Module, hift: HiFT) -> dict[str, ShardedWeight]:
    """Return this rank's rows of all weights that HiFT trains, by name.

    Raises:
        ValueError: If a parameter is missing, or not sharded by rows.
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
                f"{name} is not among the parameters that FSDP2 sharded. Prepare the model that HiFT was built over, "
                "and don't rename or replace its parameters"
            )
        shards[name] = shard_of(name, source, param_group_of[id(source)])
    return shards


@torch.no_grad()
def warm_up(model: nn.Module) -> None:
    """Let FSDP2 choose its dtypes while all parameters train. A parameter frozen at that time could never train.

    FSDP2 chooses in the first forward pass of the root. This one computes nothing.

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
    """Drop every gathered weight, so that the next forward pass gathers the shards' current values."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
