"""Candidates of a search: settings that `--fit` may change, from the cheapest to the costliest.

Roughly, settings that keep an update as it is come first, the ones that cost least time before others. Settings that
change the arithmetic of an update follow, the slightest change first. Settings that make a step several times slower,
or change the data, come last. A search never changes what is trained: method, ranks, densities, token ratios, and a
group size that the user set. It plans a candidate only if the parts of the last peak show that this can reduce what is
too large.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from slivertune.hift.config import MasterKind
from slivertune.parked.block_codes import check_available
from slivertune.parked.forms import CodesForm
from slivertune.planning.methods import clash_with_method, planned
from slivertune.planning.plan import Limits, MemoryRequirement
from slivertune.planning.request import PlanRequest

SMALL_CHUNK_BYTES = 32 * 2**20
"""Bytes of HiFT's chunks if the default ones (128 MiB) do not fit. Copies of this size still fill a PCIe bus."""
BUSY_TOKENS = 2048
"""Tokens of a forward that keep a GPU busy. Arithmetic then bounds its matrix products, not the reading of weights (a
card does about 150 to 300 bf16 operations in the time in which it reads a byte). A batch in parts of this size hardly
takes longer than the whole batch."""
TILE_SIZES = (8192, 4096, BUSY_TOKENS)
"""Tokens per tile, from the size that makes the fewest products."""
_WAITING_FORMS: tuple[CodesForm, ...] = ("int8", "nf4")
"""Values of `waiting` to try, the slightest rounding first."""
_LENGTH_STEP = 128
"""Step in tokens between sequence lengths to try, as large as the tiles of attention and matrix kernels."""

Question = Callable[[MemoryRequirement, Limits], str | None]
"""Function that returns the reason why a candidate can't help a planned run. None if it might."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Setting that a search may change."""

    title: str
    """Name of the change, for people."""
    cost: str
    """Cost of the change, which explains its place in the order."""
    fields: tuple[str, ...]
    """Fields of `PlanRequest`. If the user set one of them, the search skips the candidate."""
    options: Callable[[PlanRequest], Sequence[PlanRequest]]
    """Function that returns the changed requests, from the cheapest value to the one that needs the least memory. The
    list is empty if there is nothing to change."""
    cannot_help: Question
    """Check of the last planned run."""
    needs: tuple[str, ...] = ()
    """Fields that it also changes if they prevent it. If the user set such a field, the search skips the candidate."""
    may_hinder: bool = False
    """Whether it also makes something on the GPU larger, so that the run may need less without it once others are
    changed."""
    shrinks_weights: bool = False
    """Whether it makes the weights on the GPU smaller. If these alone do not fit, no other candidate helps."""


def all_candidates(min_seq_length: int | None = None) -> tuple[Candidate, ...]:
    """List the candidates of a search, from the cheapest to the costliest.

    Args:
        min_seq_length: Smallest length to which sequences may shrink, in tokens; None keeps them as they are.
    """
    return (
        Candidate(
            title="smaller chunks of masters and state on the GPU",
            cost="the same update; more and smaller copies, which still fill the bus",
            fields=("stream_bytes",),
            options=_smaller_chunks,
            cannot_help=_no_state_on_device,
        ),
        Candidate(
            title="the batch in parts, with accumulation",
            cost=f"the same update; forwards of {BUSY_TOKENS:,} tokens or more keep a GPU busy",
            fields=("gradient_accumulation_steps",),
            options=partial(_parts_of_batch, fewest_tokens=BUSY_TOKENS),
            cannot_help=_no_activations_too_large,
            may_hinder=True,  # gradients of the parts before it stay in the backward
        ),
        Candidate(
            title="gradient checkpointing",
            cost="the same update; each block is recomputed, about a third of a dense step's time",
            fields=("gradient_checkpointing",),
            options=_checkpointing,
            cannot_help=_no_activations_at_peak,
        ),
        Candidate(
            title="inputs of blocks on the host",
            cost="the same update to the bit; each input crosses the bus twice, overlapped with its block's compute",
            fields=("offload_activations",),
            needs=("gradient_checkpointing",),
            options=_offload_activations,
            cannot_help=_no_activations_at_peak,
        ),
        Candidate(
            title="the batch in smaller parts, with accumulation",
            cost=f"the same update; forwards of less than {BUSY_TOKENS:,} tokens may stall for memory",
            fields=("gradient_accumulation_steps",),
            options=partial(_parts_of_batch, fewest_tokens=1),
            cannot_help=_no_activations_too_large,
            may_hinder=True,  # gradients of the parts before it stay in the backward
        ),
        Candidate(
            title="gradients on the host",
            cost="the same update; each gradient is offloaded to host memory and copied back for its step",
            fields=("gradients",),
            options=_gradients_on_host,
            cannot_help=_no_gradients_at_peak,
        ),
        Candidate(
            title="MLPs and norms in tiles of tokens",
            cost="the same update except for the order of sums; MLPs are recomputed, in more and smaller products",
            fields=("token_tile_size",),
            options=_token_tiles,
            cannot_help=_nothing_to_tile,
        ),
        Candidate(
            title="weights on the host, streamed layer by layer",
            cost="the same update to the bit; a step copies the blocks' weights up to twice, which overlaps with a "
            "few thousand tokens; shorter steps stall",
            fields=("weights",),
            options=_weights_on_host,
            cannot_help=_gpu_is_large_enough,
            shrinks_weights=True,
        ),
        Candidate(
            title="one layer per group",
            cost="each update trains fewer weights, which learns less in the same time",
            fields=("layers_per_group",),
            options=_one_layer,
            cannot_help=_no_group_is_too_large,
        ),
        Candidate(
            title="8-bit optimizer state",
            cost="moments of 8 bits in place of 32 (bitsandbytes): the update changes a little, quality hardly",
            fields=("optimizer",),
            options=_eight_bit_state,
            cannot_help=_no_state_that_is_too_large,
            may_hinder=True,  # state of embeddings stays in 32 bits, and has 16 beside bf16 weights without masters
        ),
        Candidate(
            title="stepping in backward",
            cost="the same update, but gradients can't be clipped: --max_grad_norm 0",
            fields=("gradients",),
            options=_step_in_backward,
            cannot_help=_no_gradients_at_peak,
        ),
        Candidate(
            title="masters and state on disk",
            cost="the same update; each turn reads and writes a group's state, and stalls if the disk is slower",
            fields=("state",),
            options=_state_on_disk,
            cannot_help=_host_is_large_enough,
        ),
        Candidate(
            title="weights that do not train in fewer bits",
            cost="forwards run on blocks rounded to int8, or to NF4, and unpacked at each use; trained and saved "
            "weights are exact",
            fields=("waiting",),
            options=_waiting_in_fewer_bits,
            cannot_help=_gpu_is_large_enough,
            shrinks_weights=True,
        ),
        Candidate(
            title="bf16 weights without masters",
            cost="with stochastic rounding if that is enough; else updates below half of a weight's last bit (of 8) "
            "are lost, which matters at small learning rates",
            fields=("precision", "master"),
            options=_no_masters,
            cannot_help=_no_masters_at_peak,
            shrinks_weights=True,
        ),
        Candidate(
            title="frozen weights in 4 bits",
            cost="the frozen weights are rounded to NF4, and unpacked at each use",
            fields=("load_in_4bit", "precision"),
            options=_four_bits,
            cannot_help=_gpu_is_large_enough,
            shrinks_weights=True,
        ),
        Candidate(
            title="frozen weights on the host, streamed layer by layer",
            cost="the same update to the bit; a step copies the blocks' weights twice, which overlaps with a few "
            "thousand tokens; shorter steps stall",
            fields=("weights",),
            options=_frozen_weights_on_host,
            cannot_help=_gpu_is_large_enough,
            shrinks_weights=True,
        ),
        Candidate(
            title="weights on the host, by FSDP2's CPU offload",
            cost="the same update; all weights cross the bus in each forward and backward, which stall for them",
            fields=("layout", "offload_parameters", "num_gpus"),
            options=_offload,
            cannot_help=_gpu_is_large_enough,
            shrinks_weights=True,
        ),
        Candidate(
            title="shorter sequences",
            cost="longer rows of the data are cut; only as far as --min_seq_length allows",
            fields=(),
            options=partial(_shorter, min_seq_length),
            cannot_help=_no_activations_too_large,
        ),
    )


def _smaller_chunks(request: PlanRequest) -> list[PlanRequest]:
    streams = _reads(request, "stream_bytes") and request.state != "device" and request.stream_bytes > SMALL_CHUNK_BYTES
    return [replace(request, stream_bytes=SMALL_CHUNK_BYTES)] if streams else []


def _checkpointing(request: PlanRequest) -> list[PlanRequest]:
    return [] if request.gradient_checkpointing else [replace(request, gradient_checkpointing=True)]


def _offload_activations(request: PlanRequest) -> list[PlanRequest]:
    if request.offload_activations:
        return []
    return _changed(request, gradient_checkpointing=True, offload_activations=True)


def _token_tiles(request: PlanRequest) -> list[PlanRequest]:
    if request.token_tile_size is not None:
        return []
    # A forward that has no more tokens than the smallest tile needs no tiles, but may still have them.
    sizes = [size for size in TILE_SIZES if size < _num_tokens(request)] or [TILE_SIZES[-1]]
    return [tiled for size in sizes for tiled in _changed(request, token_tile_size=size)]


def _weights_on_host(request: PlanRequest) -> list[PlanRequest]:
    # `weights="host"` and `waiting` can be combined, but a search takes only one of them.
    # Where all blocks stay frozen, 4 bits cost less time.
    if not planned(request.method).trains_in_groups or request.weights == "host" or request.waiting is not None:
        return []
    return _changed(request, weights="host")


def _frozen_weights_on_host(request: PlanRequest) -> list[PlanRequest]:
    if not _reads(request, "weights") or planned(request.method).trains_in_groups or request.weights == "host":
        return []
    return _changed(request, weights="host")


def _waiting_in_fewer_bits(request: PlanRequest) -> list[PlanRequest]:
    if not planned(request.method).trains_in_groups or request.parks:
        return []
    return [waiting for form in _WAITING_FORMS if _is_available(form) for waiting in _changed(request, waiting=form)]


def _is_available(form: CodesForm) -> bool:
    try:
        check_available(form)
    except ImportError:
        return False
    return True


def _one_layer(request: PlanRequest) -> list[PlanRequest]:
    may = _reads(request, "layers_per_group") and request.layers_per_group != 1
    return [replace(request, layers_per_group=1)] if may else []


def _eight_bit_state(request: PlanRequest) -> list[PlanRequest]:
    is_adam = request.optimizer == "adamw" and not planned(request.method).is_optimizer
    return _changed(request, optimizer="adamw8bit") if is_adam else []


def _gradients_on_host(request: PlanRequest) -> list[PlanRequest]:
    may = request.layout in ("single", "ddp") and request.state != "device" and _reads(request, "gradients")
    return [replace(request, gradients="host")] if may and request.gradients == "device" else []


def _step_in_backward(request: PlanRequest) -> list[PlanRequest]:
    may = request.layout == "single" and _reads(request, "gradients") and request.gradients != "stepped"
    return [replace(request, gradients="stepped")] if may else []


def _state_on_disk(request: PlanRequest) -> list[PlanRequest]:
    return _changed(request, state="disk") if _reads(request, "state") and request.state == "host" else []


def _no_masters(request: PlanRequest) -> list[PlanRequest]:
    if request.precision == "bf16":
        return []
    kinds: tuple[MasterKind | None, ...] = ("stochastic", None) if _reads(request, "master") else (None,)
    return [bf16 for kind in kinds for bf16 in _changed(request, precision="bf16", master=kind)]


def _four_bits(request: PlanRequest) -> list[PlanRequest]:
    may = clash_with_method(request.method) is None and not request.load_in_4bit and request.layout == "single"
    may = may and not request.parks
    if not may:
        return []
    return [replace(request, load_in_4bit=True, precision="fp32" if request.precision == "fp32" else "bf16")]


def _offload(request: PlanRequest) -> list[PlanRequest]:
    if _reads(request, "weights"):  # `weights="host"` overlaps its copies
        return []
    if request.offload_parameters or request.load_in_4bit or request.layout != "single":
        return []
    return _changed(request, layout="fsdp2", offload_parameters=True, gradients="device")


def _parts_of_batch(request: PlanRequest, *, fewest_tokens: int) -> list[PlanRequest]:
    sizes = range(request.batch_size - 1, 0, -1)
    num_sequences = request.gradient_accumulation_steps * request.batch_size
    return [
        replace(request, batch_size=size, gradient_accumulation_steps=num_sequences // size)
        for size in sizes
        if request.batch_size % size == 0 and size * request.seq_length >= fewest_tokens
    ]


def _shorter(minimum: int | None, request: PlanRequest) -> list[PlanRequest]:
    if minimum is None or minimum >= request.seq_length:
        return []
    lengths = [length for length in range(request.seq_length - 1, minimum, -1) if length % _LENGTH_STEP == 0]
    return [replace(request, seq_length=length) for length in (*lengths, minimum)]


def _reads(request: PlanRequest, setting: str) -> bool:
    return setting in planned(request.method).settings


def _changed(request: PlanRequest, **changes: Any) -> list[PlanRequest]:
    """Change settings of a request, or return nothing if they contradict the others or need a missing library."""
    try:
        return [replace(request, **changes)]
    except (ValueError, ImportError):
        return []


def _num_tokens(request: PlanRequest) -> int:
    return request.batch_size * request.seq_length


def _no_activations_too_large(requirement: MemoryRequirement, limits: Limits) -> str | None:
    if requirement.plan.request.offload_activations and _host_is_large_enough(requirement, limits) is None:
        return None
    return _no_activations_at_peak(requirement, limits)


def _nothing_to_tile(requirement: MemoryRequirement, limits: Limits) -> str | None:
    if _num_tokens(requirement.plan.request) <= TILE_SIZES[-1]:
        return f"a forward has no more than {TILE_SIZES[-1]:,} tokens, the smallest tile"
    return _no_activations_at_peak(requirement, limits)


def _gpu_is_large_enough(requirement: MemoryRequirement, limits: Limits) -> str | None:
    return None if requirement.missing_device_bytes(limits) else "it would save GPU memory, which is large enough"


def _host_is_large_enough(requirement: MemoryRequirement, limits: Limits) -> str | None:
    return None if requirement.missing_host_bytes(limits) else "it would save host memory, which is large enough"


def _no_group_is_too_large(requirement: MemoryRequirement, limits: Limits) -> str | None:
    # With state on disk, two buffers as large as the largest group are all that the host holds of it.
    if requirement.plan.request.state == "disk" and _host_is_large_enough(requirement, limits) is None:
        return None
    return _gpu_is_large_enough(requirement, limits)


def _all_that_waits_has_room(requirement: MemoryRequirement, limits: Limits) -> str | None:
    if requirement.missing_disk_bytes(limits):
        return None
    return _host_is_large_enough(requirement, limits)


def _no_activations_at_peak(requirement: MemoryRequirement, limits: Limits) -> str | None:
    if requirement.plan.peak.phase == "step":
        return "the peak is in the optimizer's step, without activations"
    return _gpu_is_large_enough(requirement, limits)


def _no_gradients_at_peak(requirement: MemoryRequirement, limits: Limits) -> str | None:
    return (
        _gpu_is_large_enough(requirement, limits)
        if requirement.plan.peak.gradients
        else "no gradients are stored at the peak"
    )


def _no_state_on_device(requirement: MemoryRequirement, limits: Limits) -> str | None:
    if not requirement.plan.peak.state:
        return "no masters or optimizer state are on the GPU at the peak"
    return _gpu_is_large_enough(requirement, limits)


def _no_state_that_is_too_large(requirement: MemoryRequirement, limits: Limits) -> str | None:
    if _all_that_waits_has_room(requirement, limits) is None:
        return None
    return _no_state_on_device(requirement, limits)


def _no_masters_at_peak(requirement: MemoryRequirement, limits: Limits) -> str | None:
    if _all_that_waits_has_room(requirement, limits) is None:
        return None
    if requirement.plan.request.precision == "mixed_hi":
        # The weights on the GPU are bf16 already.
        return _no_state_on_device(requirement, limits)
    return _gpu_is_large_enough(requirement, limits)
