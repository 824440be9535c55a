"""The search against a made-up model of memory, whose least settings are known by hand."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from slivertune.planning.candidates import BUSY_TOKENS, SMALL_CHUNK_BYTES, all_candidates
from slivertune.planning.methods import planned_methods
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import DoesNotFitError, Found, search, start_of_search
from tests.planning.made import GIB, moment, simple_plan

MIB = 2**20
WEIGHTS = 10 * GIB


def memory_of(request: PlanRequest) -> MemoryRequirement:
    """7B or so: activations by tokens, a group's gradients, pieces of state; all monotone in each setting."""
    tokens = request.batch_size * request.seq_length
    # Of a checkpointed token half are inputs of blocks; of all that blocks keep, MLPs have half.
    inputs, inside = (MIB // 8, MIB // 8) if request.gradient_checkpointing else (0, 2 * MIB)
    tile = min(tokens, request.token_tile_size or tokens)
    activations = (tokens + tile) * inside // 2 + (0 if request.offload_activations else tokens * inputs)
    gradients = 64 * MIB if request.gradients != "device" else 512 * MIB
    state_bytes = {"adamw": 8, "adamw8bit": 2}.get(request.optimizer, 4)
    masters = 4 if request.master_kind == "fp32" else 0
    weights = WEIGHTS if request.precision in ("bf16", "mixed_hi") else 2 * WEIGHTS
    weights = weights // 4 if request.load_in_4bit else weights
    exact = weights
    weights = weights // {"int8": 2, "nf4": 4}[request.waiting] if request.waiting else weights
    host = 5 * (state_bytes + masters) * GIB
    if request.method == "hift":
        state = 2 * (request.stream_bytes or GIB) + (16 * MIB if request.master == "stochastic" else 0)
    else:
        state, host, gradients = state_bytes * GIB, 0, WEIGHTS
    if request.method in ("sft", "lora"):
        gradients, state = 100 * MIB, 200 * MIB
    waiting = exact if request.waiting and not masters else 0
    if request.offload_parameters or request.weights == "host":
        waiting, weights = weights, GIB
    waiting += tokens * inputs if request.offload_activations else 0
    backward = moment(parameters=weights, gradients=gradients if request.gradient_accumulation_steps > 1 else 0,
                      residual=activations)  # fmt: skip
    step = moment(phase="step", parameters=weights, gradients=gradients, state=state)
    on_disk = request.state == "disk"
    return add_allowance(
        simple_plan(
            request,
            max(backward, step, key=lambda each: each.total),
            host_bytes=waiting + (0 if on_disk else host),
            disk_bytes=host if on_disk else 0,
        )
    )


SMALL = {"batch_size": 1, "seq_length": 512}


def find(
    limit: int, *, host: int | None = None, disk: int | None = None, min_seq_length: int | None = None, **given: Any
) -> Found:
    return search(
        start_of_search({**SMALL, **given}),
        all_candidates(min_seq_length),
        Limits(device_bytes=limit, host_bytes=host, disk_bytes=disk),
        memory_of,
        fixed=given,
    )


def search_noting(seen: list[PlanRequest], given: dict[str, Any], limit: int) -> Found:
    """A search that notes what it plans."""

    def memory_noted(request: PlanRequest) -> MemoryRequirement:
        seen.append(request)
        return memory_of(request)

    return search(start_of_search({**SMALL, **given}), all_candidates(), Limits(device_bytes=limit), memory_noted)


def chosen(found: Found) -> dict[str, Any]:
    return {name: new for step in found.steps for name, (_, new) in step.changes.items()}


def test_where_the_start_fits_nothing_is_changed_and_one_plan_is_made() -> None:
    found = find(40 * GIB, batch_size=8)
    assert (found.steps, found.num_plans) == ((), 1)
    assert found.requirement.plan.request == PlanRequest(precision="mixed_hi", batch_size=8, seq_length=512)


@pytest.mark.parametrize(
    ("method", "precision"), [("hift", "mixed_hi"), ("dense", "mixed"), ("sft", "bf16"), ("lora", "bf16")]
)
def test_a_search_starts_from_16_bit_arithmetic_unless_told_otherwise(method: Any, precision: str) -> None:
    assert method in planned_methods()
    assert start_of_search({"method": method}).precision == precision
    assert start_of_search({"method": method, "precision": "fp32"}).precision == "fp32"


@pytest.mark.parametrize("master", ["none", "stochastic"])
def test_a_search_keeps_the_masters_that_were_given(master: Any) -> None:
    assert (start := find(40 * GIB, master=master).start.plan.request).precision == "bf16"
    assert start.master == master


def test_a_batch_is_split_before_anything_is_computed_twice_and_no_finer_than_needed() -> None:
    # 16 x 512 tokens take 16 GiB of activations, 8 take 8, 4 (2,048 tokens) take 4.
    found = find(20 * GIB, batch_size=16)
    assert chosen(found) == {"batch_size": 8, "gradient_accumulation_steps": 2}
    assert not found.requirement.plan.request.gradient_checkpointing
    assert found.requirement.fits(Limits(device_bytes=20 * GIB))


def test_the_effective_batch_stays_whatever_is_chosen() -> None:
    for limit in range(12, 30):
        request = find(limit * GIB, batch_size=12, gradient_accumulation_steps=3).requirement.plan.request
        assert request.batch_size * request.gradient_accumulation_steps == 36


def test_checkpointing_comes_before_forwards_too_small_for_a_gpu_and_gives_the_batch_back() -> None:
    # 2,048 tokens need 4 GiB without checkpointing; all 8 x 512 need 1 GiB with it.
    found = find(13 * GIB, batch_size=8)
    assert BUSY_TOKENS == 4 * 512
    assert chosen(found) == {"gradient_checkpointing": True}
    assert dict(found.skipped)["the batch in parts, with accumulation"].startswith("needless")


@pytest.mark.parametrize(
    ("limit", "given", "changes"),
    [
        # One sequence takes 4 GiB without checkpointing, which is too much; with it 16 take 8 GiB, 8 take 4, 4 take 2.
        (
            15 * GIB,
            {"batch_size": 16, "seq_length": 2048},
            {"batch_size": 4, "gradient_accumulation_steps": 4, "gradient_checkpointing": True},
        ),
        # The step needs 512 + 256 MiB beside the weights, a short forward next to nothing.
        (11 * GIB + 200 * MIB, {"seq_length": 16}, {"stream_bytes": SMALL_CHUNK_BYTES}),
        (25 * GIB, {"method": "dense"}, {"optimizer": "adamw8bit", "precision": "bf16"}),
        (31 * GIB, {"method": "dense"}, {"precision": "bf16"}),  # fp32 weights alone take 20 GiB
        # Of 65,536 checkpointed tokens inputs take 8 GiB, and MLPs and what is around them 4 each.
        (20 * GIB, {"seq_length": 65536}, {"gradient_checkpointing": True, "offload_activations": True}),
        (20 * GIB, {"seq_length": 65536, "gradient_checkpointing": True}, {"offload_activations": True}),
        (
            16 * GIB,
            {"seq_length": 65536},
            {"gradient_checkpointing": True, "offload_activations": True, "token_tile_size": 8192},
        ),
        (
            15 * GIB + 200 * MIB,
            {"seq_length": 65536},
            {"gradient_checkpointing": True, "offload_activations": True, "token_tile_size": 4096},
        ),
        (
            12 * GIB,
            {"seq_length": 65536},
            {"gradient_checkpointing": True, "offload_activations": True, "weights": "host"},
        ),
        (8 * GIB, {"weights": "device"}, {"waiting": "int8"}),
        (5 * GIB, {"weights": "device"}, {"waiting": "nf4"}),
        (15 * GIB, {"method": "dense"}, {"layout": "fsdp2", "offload_parameters": True, "optimizer": "adamw8bit"}),
        (8 * GIB, {"method": "lora"}, {"load_in_4bit": True}),
        (8 * GIB, {"method": "sft"}, {"load_in_4bit": True}),
    ],
    ids=[
        "a batch that fits in part beside checkpointing is given back in part",
        "smaller pieces are taken where the peak is in the step",
        "dense gives up masters and the 32 bits of its state before it streams weights",
        "dense gives up masters alone where that is enough",
        "inputs of blocks leave for the host where checkpointing alone is not enough",
        "inputs of blocks leave where the user has asked for checkpointing",
        "tiles of tokens come after inputs have left",
        "tiles are no smaller than needed",
        "weights on the host give the tiles back",
        "weights wait in int8 where that is enough",
        "weights wait in NF4 where int8 is not enough",
        "dense has FSDP2's way alone to stream weights",
        "lora's frozen weights are put into 4 bits",
        "sft's frozen weights are put into 4 bits",
    ],
)
def test_the_least_costly_settings_that_fit_are_chosen(
    limit: int, given: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert chosen(find(limit, **given)) == changes


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2, "layout": "single"}])
def test_gradients_leave_the_device_where_they_count_and_can_still_be_clipped(settings: dict[str, Any]) -> None:
    found = chosen(find(10 * GIB + 850 * MIB, seq_length=16, **settings))
    assert found == {"stream_bytes": SMALL_CHUNK_BYTES, "gradients": "host"}


@pytest.mark.parametrize(
    ("host_gib", "changes"),
    [
        (60, {}),
        (59, {"optimizer": "adamw8bit"}),
        (30, {"optimizer": "adamw8bit"}),
        (29, {"state": "disk"}),
    ],
)
def test_host_memory_is_spared_in_its_own_order(host_gib: int, changes: dict[str, Any]) -> None:
    # 5 GiB for each byte per weight: 12 with AdamW's state and fp32 masters, 6 with 8-bit state.
    assert chosen(find(40 * GIB, host=host_gib * GIB)) == changes


def test_weights_without_masters_are_rounded_stochastically_where_copies_in_fp32_have_room() -> None:
    given: dict[str, Any] = {"seq_length": 16, "state": "host", "optimizer": "adamw", "gradients": "device"}
    given |= {"stream_bytes": SMALL_CHUNK_BYTES}
    needed = find(40 * GIB, **given).start.device_bytes
    assert chosen(find(40 * GIB, host=40 * GIB, **given)) == {"precision": "bf16", "master": "stochastic"}
    assert chosen(find(needed, host=40 * GIB, **given)) == {"precision": "bf16"}


def test_a_disk_too_small_for_the_state_is_spared_as_the_host_is() -> None:
    assert chosen(find(40 * GIB, disk=60 * GIB, state="disk")) == {}
    assert chosen(find(40 * GIB, disk=59 * GIB, state="disk")) == {"optimizer": "adamw8bit"}
    # 60 GiB wait; on the disk there is less room than on the host.
    assert chosen(find(40 * GIB, host=50 * GIB, disk=10 * GIB)) == {"optimizer": "adamw8bit"}
    with pytest.raises(DoesNotFitError, match=r"21\.00 GiB short of disk\. .*, and 30\.00 GiB of disk, with "):
        find(40 * GIB, disk=9 * GIB, state="disk", precision="mixed_hi")


def test_the_host_is_relieved_of_what_was_moved_there_from_the_gpu() -> None:
    # 40 GiB of state and 10 of weights wait; 8 bits make 10 GiB of the state, and the disk has room for all of it.
    streamed = {"weights": "host"}
    assert chosen(find(4 * GIB, host=50 * GIB, precision="bf16")) == streamed
    assert chosen(find(4 * GIB, host=44 * GIB, precision="bf16")) == {**streamed, "optimizer": "adamw8bit"}
    given = {"precision": "bf16", "optimizer": "adamw"}
    assert chosen(find(4 * GIB, host=44 * GIB, **given)) == {**streamed, "state": "disk"}


def test_weights_wait_in_fewer_bits_where_the_host_has_no_room_for_them() -> None:
    given = {"state": "host", "optimizer": "adamw", "precision": "mixed_hi"}
    assert chosen(find(8 * GIB, host=70 * GIB, **given, master="fp32")) == {"weights": "host"}
    assert chosen(find(8 * GIB, host=69 * GIB, **given, master="fp32")) == {"waiting": "int8"}


def test_what_a_candidate_needs_as_well_stays_as_the_user_set_it() -> None:
    given = {"seq_length": 65536, "gradient_checkpointing": False, "weights": "device", "waiting": None}
    with pytest.raises(DoesNotFitError):
        find(20 * GIB, **given)


def test_what_the_host_has_no_room_for_is_left_where_something_else_fits() -> None:
    given = {"precision": "bf16", "state": "host", "optimizer": "adamw", "seq_length": 65536}
    found = find(12 * GIB, host=45 * GIB, min_seq_length=64, **given)
    # All but 5 GiB of the host are state; 10 of weights would wait there, or what inputs of blocks leave room for.
    assert found.requirement.plan.request.weights == "device"
    assert chosen(found).keys() == {"gradient_checkpointing", "offload_activations", "token_tile_size", "seq_length"}


def test_weights_that_do_not_fit_alone_are_streamed_and_nothing_else_is_tried_first() -> None:
    seen: list[PlanRequest] = []
    found = search_noting(seen, {}, 8 * GIB)
    assert chosen(found) == {"weights": "host"}
    assert seen[1].weights == "host" and not seen[1].gradient_checkpointing
    assert found.num_plans == len(seen) == 2


def test_sequences_are_shortened_only_where_that_is_allowed_and_no_more_than_needed() -> None:
    limit = 12 * GIB
    given = {"seq_length": 65536, "weights": "device", "waiting": None}
    with pytest.raises(DoesNotFitError):
        find(limit, **given)
    found = find(limit, min_seq_length=64, **given)
    length = chosen(found)["seq_length"]
    assert length % 128 == 0
    request = found.requirement.plan.request
    assert not memory_of(replace(request, seq_length=length + 128)).fits(Limits(device_bytes=limit))


@pytest.mark.parametrize(
    ("fixed", "least"),
    [
        ({"gradient_checkpointing": False}, {"batch_size": 1, "gradient_accumulation_steps": 8}),
        ({"gradient_checkpointing": True}, {}),
    ],
)
def test_what_the_user_set_is_not_changed_but_for_the_batch(fixed: dict[str, Any], least: dict[str, Any]) -> None:
    found = find(13 * GIB, batch_size=8, **fixed)
    assert chosen(found) == least
    assert all(getattr(found.requirement.plan.request, name) == value for name, value in fixed.items())


def test_an_impossible_fit_says_the_smallest_gpu_that_would_do_which_then_does() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        find(2 * GIB, batch_size=4, weights="device", waiting=None, precision="mixed_hi")
    text = str(caught.value)
    assert text.startswith("no setting that may change makes this fit 2.00 GiB. The smallest GPU that would do has 1")
    assert "--weights" in text and "Not changed, as the command sets it" in text
    match = re.search(r"\(([\d,]+) bytes", text)
    assert match is not None
    smallest = int(match[1].replace(",", ""))
    given = {"batch_size": 4, "weights": "device", "waiting": None, "precision": "mixed_hi"}
    assert find(smallest, **given).requirement.device_bytes <= smallest
    with pytest.raises(DoesNotFitError):
        find(smallest - 1, **given)


def test_an_impossible_fit_of_the_host_names_what_waits_there() -> None:
    with pytest.raises(
        DoesNotFitError, match=r"and 60\.00 GiB of host memory, as asked\. Not changed, as the command sets it"
    ):
        find(40 * GIB, host=GIB, state="host", master="fp32", precision="mixed_hi", optimizer="adamw")


def test_an_impossible_fit_says_where_it_is_short_and_what_was_assumed() -> None:
    given = {"state": "host", "master": "fp32", "precision": "mixed_hi", "optimizer": "adamw"}
    limits = Limits(device_bytes=40 * GIB, host_bytes=GIB, assumed=frozenset({"host_bytes"}))
    lines: list[str] = []
    with pytest.raises(DoesNotFitError) as caught:
        search(PlanRequest(**SMALL, **given), all_candidates(), limits, memory_of, fixed=given, tell=lines.append)
    assert str(caught.value).startswith(
        "no setting that may change makes this fit 40.00 GiB and 1.00 GiB of host memory that this machine has "
        "free. The run is 59.00 GiB short of host memory. The smallest GPU that would do has "
    )
    assert lines[0].endswith("does not fit, 59.00 GiB short of host memory")


def test_a_setting_that_can_not_be_planned_is_passed_over_with_the_reason() -> None:
    def no_checkpoints(request: PlanRequest) -> MemoryRequirement:
        if request.gradient_checkpointing:
            raise ValueError("no\ncheckpoints here")
        return memory_of(request)

    found = search(
        start_of_search({"batch_size": 8, "seq_length": 512}),
        all_candidates(),
        Limits(device_bytes=13 * GIB),
        no_checkpoints,
    )
    assert chosen(found) == {"batch_size": 1, "gradient_accumulation_steps": 8}
    assert dict(found.skipped)["gradient checkpointing"] == "can't be planned: no checkpoints here"


def test_what_can_not_change_the_peak_is_not_planned() -> None:
    seen: list[PlanRequest] = []
    found = search_noting(seen, {"batch_size": 16}, 20 * GIB)
    assert all(request.optimizer == "adamw" and request.stream_bytes == 128 * MIB for request in seen)
    reasons = dict(found.skipped)
    for title in ("smaller chunks of masters and state on the GPU", "8-bit optimizer state"):
        assert reasons[title] == "no masters or optimizer state are on the GPU at the peak"
    assert reasons["masters and state on disk"] == "it would save host memory, which is large enough"
    assert len(seen) == len(set(seen)) == found.num_plans, "nothing is planned twice"


def test_each_plan_is_told_of() -> None:
    lines: list[str] = []
    search(
        start_of_search({"batch_size": 16, "seq_length": 512}),
        all_candidates(),
        Limits(device_bytes=20 * GIB),
        memory_of,
        tell=lines.append,
    )
    assert lines[0].startswith("plan 1: ") and lines[0].endswith("GiB with the allowance, does not fit")
    assert lines[-1].endswith("fits")


@pytest.mark.parametrize(("limit", "num_plans"), [(11 * GIB, 10), (20 * GIB, 8)])
def test_what_the_last_fit_took_is_taken_at_once(limit: int, num_plans: int) -> None:
    # From no change at all, each further question would plan checkpointing, offloading and the tiles one by one.
    assert find(limit, seq_length=131072).num_plans <= num_plans


@pytest.mark.parametrize("method", planned_methods())
def test_the_options_of_a_candidate_go_from_the_cheapest_to_the_least(method: Any) -> None:
    start = start_of_search({"method": method, "batch_size": 24, "seq_length": 4096})
    for candidate in all_candidates(min_seq_length=100):
        options = [start, *candidate.options(start)]
        bytes_needed = [memory_of(option).device_bytes for option in options[1:]]
        assert bytes_needed == sorted(bytes_needed, reverse=True), candidate.title
        assert len(set(options)) == len(options), f"{candidate.title} offers what is there already"
        for option in options[1:]:
            changed = {name for name in ("method", "lora_rank", "density", "token_ratio", "layers_per_group")
                       if getattr(option, name) != getattr(start, name)}  # fmt: skip
            assert changed <= {*candidate.fields} & {"layers_per_group"}, f"{candidate.title} changes what is trained"


def test_a_search_never_needs_more_than_a_costlier_one_and_takes_no_more_than_it_must() -> None:
    # The smaller the GPU, the more is changed: what a smaller one does without, a larger one does, too.
    titles = [[step.title for step in find(limit * GIB, batch_size=32).steps] for limit in range(50, 9, -1)]
    rank = {candidate.title: place for place, candidate in enumerate(all_candidates())}
    costs = [max((rank[title] for title in found), default=-1) for found in titles]
    assert all(larger <= smaller for larger, smaller in pairwise(costs))
    assert costs[0] == -1 and costs[-1] > rank["gradient checkpointing"]
