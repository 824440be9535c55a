"""Put HiFT together by its settings: the owner of each group's state, the route of gradients, and the other parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from slivertune.hift.chunk import Weight
from slivertune.hift.device_budget import chunks_bytes, share_out
from slivertune.hift.gradient_routes import DeviceGradients, Steps
from slivertune.hift.group_state import GroupState
from slivertune.hift.host_gradients import HostGradients, bytes_of
from slivertune.hift.host_room import HostRoom
from slivertune.hift.in_backward import SteppedGradients
from slivertune.hift.layers_above import LayersAbove
from slivertune.hift.offload_buffer import offloaded_bytes
from slivertune.hift.offloaded_state import OffloadedState
from slivertune.hift.parked_weights import ParkedWeights, blocks_by_group
from slivertune.hift.parts import Part
from slivertune.hift.prefetch import Prefetcher
from slivertune.hift.probe import StepMeter
from slivertune.hift.rotation import Group
from slivertune.hift.state_places import STATE_PLACES, Groups
from slivertune.hift.trainable import check_master
from slivertune.parked.park import refuse_parked
from slivertune.parked.parked_blocks import ParkedBlocks
from slivertune.parked.streamed_model import compute_device


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Parts of one HiFT over one model, and what it must know of them."""

    states: Sequence[GroupState]
    """Owners of all groups' masters and state, by index."""
    route: DeviceGradients
    """Route of gradients to the step."""
    parts: Sequence[Part]
    """All parts, in the order in which they are told."""
    sizes: Callable[[], list[int]]
    """Function that returns the bytes of each group's masters and state, by index."""
    parked: ParkedBlocks
    """Weights of the model's blocks in the forms and places that they have between turns."""
    has_files: bool
    """Whether groups' state is stored in files."""
    room: HostRoom
    """Room on the host for what is offloaded, to take before the first update."""


def assemble(
    model: nn.Module,
    groups: Sequence[Group],
    weights: Mapping[str, Weight],
    meter: StepMeter,
    param_groups: Sequence[Mapping[str, Any]],
    steps: Steps,
    coming: Sequence[int],
) -> Assembly:
    """Build the parts of one HiFT over one model.

    Args:
        model: Model that holds the weights.
        groups: Groups of layers, by index.
        weights: Trained weights by name.
        meter: Meter of the base optimizer's steps, with HiFT's settings.
        param_groups: Param groups of the user's optimizer.
        steps: Functions that the route of gradients calls.
        coming: All groups in the order of their next turns.

    Raises:
        ValueError: If a setting does not fit the model.
        MemoryError: If exact weights are to be offloaded, and the host has no room.
    """
    config = meter.config
    if config.parks:
        refuse_parked(model, "build HiFT with waiting= or weights='host'")
    if config.weights == "host":
        home = compute_device(model)
        weights = {name: replace(each, home=home) for name, each in weights.items()}
    check_master(config.master, weights.values())
    meter.compile_steps(weights.values())
    of_groups = [[weights[name] for name in group.parameter_names] for group in groups]
    sizes = partial(_sizes, of_groups, meter)
    prefetch_bytes, resident_bytes = share_out(config, lambda: _largest_on_device(of_groups, meter))
    prefetcher = Prefetcher(prefetch_bytes, shares_bus=config.weights == "host")
    parked = ParkedBlocks(
        model,
        config.waiting or "exact",
        config.weights,
        resident_bytes,
        trained=blocks_by_group(model, groups) if config.weights == "host" else (),
        streams_of=lambda device: prefetcher.slots_of(device).streams,
    )
    states, disk = STATE_PLACES[config.state](
        Groups(weights=of_groups, meter=meter, prefetcher=prefetcher, sizes=sizes, coming=coming)
    )
    room = HostRoom(states, meter, disk)
    of_gradients = [bytes_of(each) for each in of_groups]
    gradient_bytes = sum(of_gradients) if config.inactive == "above" else max(of_gradients)
    if config.waiting is not None:
        room.take(gradient_bytes if config.gradients == "host" else 0)
    parking = None
    if config.parks:
        offloaded = [each for each in states if isinstance(each, OffloadedState)]
        parking = ParkedWeights(parked, offloaded, lambda: max(sizes()))
    above = LayersAbove(of_groups, config, param_groups) if config.inactive == "above" else None
    host = partial(
        HostGradients,
        steps,
        config.max_grad_norm,
        slots_of=prefetcher.slots_of,
        take_room=room.take,
        in_flight_bytes=config.stream_bytes,
        num_bytes=gradient_bytes,
    )
    routes: dict[str, Callable[[], DeviceGradients]] = {
        "device": lambda: DeviceGradients(steps, config.max_grad_norm),
        "host": host,
        "stepped": lambda: SteppedGradients(steps, weights, host(), above),
    }
    route = routes[config.gradients]()
    parts = (disk, parking, prefetcher, above, route)
    return Assembly(
        states=states,
        route=route,
        parts=[each for each in parts if each is not None],
        sizes=sizes,
        parked=parked,
        has_files=disk is not None,
        room=room,
    )


def _largest_on_device(groups: Sequence[Sequence[Weight]], meter: StepMeter) -> int:
    """Return the bytes of all chunks of the largest group, whose state is measured, whatever the base optimizer is."""
    return max(
        chunks_bytes(meter.config, offloaded_bytes(weights, meter, is_measured=True).total(), bytes_of(weights))
        for weights in groups
    )


def _sizes(groups: Sequence[Sequence[Weight]], meter: StepMeter) -> list[int]:
    return [offloaded_bytes(weights, meter).total() for weights in groups]
