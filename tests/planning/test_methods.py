"""The methods' own numbers: bytes of a trained weight, activations of selected tokens, bytes of a 4-bit weight."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import slivertune
from slivertune.core.layers import find_layers
from slivertune.core.ledger import StateCount
from slivertune.hift import HiFT, HiFTConfig
from slivertune.hift.rotation import cut_groups
from slivertune.planning.alike_groups import alike
from slivertune.planning.batches import make_batch
from slivertune.planning.fake import without_data
from slivertune.planning.hift_run import HiFTRun
from slivertune.planning.make import make_plan
from slivertune.planning.model import attached, build_model, give_sizes
from slivertune.planning.optimizers import without_trainer
from slivertune.planning.plan import Plan
from slivertune.planning.request import PlanRequest
from tests.helpers.plan_requests import paper_request
from tests.helpers.ranks import quick
from tests.planning.made import plan_made_once
from tests.planning.real import LLAMA, real_batch, real_model


def plan_of(request: PlanRequest) -> Plan:
    return plan_made_once(request, LLAMA)


SPARSE = paper_request(method="sft", precision="bf16", density=0.02, batch_size=2, seq_length=64)


def test_sft_by_accumulated_gradients_takes_20_bytes_a_weight_and_36_inside_a_phase() -> None:
    inside, outside = plan_of(SPARSE).groups
    assert inside.num_parameters == outside.num_parameters
    assert outside.state_bytes / outside.num_parameters == pytest.approx(20, rel=1e-3)
    assert inside.state_bytes / inside.num_parameters == pytest.approx(36, rel=1e-3)
    # The gathered gradient, in fp32; and one number more, which tells of clipping.
    assert outside.gradient_bytes == 4 * outside.num_parameters + 4


def test_each_group_of_the_default_schedule_is_planned_with_the_state_of_its_own_weights() -> None:
    plan = plan_of(PlanRequest(precision="mixed_hi", batch_size=2, seq_length=64))
    # A quarter of six layers is two: three groups.
    assert [len(group.indices) for group in plan.groups] == [1, 1, 1]
    for group in plan.groups:
        assert group.master_bytes == 4 * group.num_parameters
        assert group.state_bytes == pytest.approx(8 * group.num_parameters, rel=1e-3)


def test_sft_with_accumulation_takes_no_other_state() -> None:
    alone, accumulated = (plan_of(replace(SPARSE, gradient_accumulation_steps=n)).groups for n in (1, 2))
    for before, after in zip(alone, accumulated, strict=True):
        assert after.state_bytes == before.state_bytes
        # The first micro-batch's gradients stay. The second is searched beside all pools, and merged with one of them.
        # A search counts values in a MiB of bins.
        more = after.peak.total - before.peak.total - before.gradient_bytes
        assert 0 <= more <= 2**20 + 16 * before.num_parameters


def test_sft_by_momentum_takes_10_bytes_a_weight_and_a_number_a_row_and_column() -> None:
    (group,) = plan_of(replace(SPARSE, selection="momentum")).groups
    block = 4 * (128 + 128) + 3 * (128 + 256)
    assert group.state_bytes == pytest.approx(10 * group.num_parameters + 4 * 4 * block, rel=1e-3)


def test_sft_trains_the_share_that_was_asked_for_and_the_models_parameters_stay_what_they_are() -> None:
    plan = plan_of(SPARSE)
    in_blocks = 4 * (4 * 128 * 128 + 3 * 128 * 256)
    assert plan.num_trainable_peak == pytest.approx(0.02 * in_blocks, rel=1e-3)
    dense = plan_of(replace(SPARSE, method="dense", density=None))
    assert (plan.num_parameters, plan.parameter_bytes) == (dense.num_parameters, dense.parameter_bytes)


WIDE = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5])
def test_selected_tokens_keep_their_share_of_activations_and_all_keys_and_values(ratio: float) -> None:
    """The floor: r of what dense training saves, and the keys and values of the other tokens (TokenTune, section 3)."""
    sizes: dict[str, Any] = {"method": "dense", "precision": "fp32", "batch_size": 4, "seq_length": 256}
    dense = make_plan(paper_request(**sizes), WIDE).groups[0].activation_bytes
    saved = make_plan(paper_request(token_ratio=ratio, **sizes), WIDE).groups[0].activation_bytes
    keys_and_values = (1 - ratio) * 2 * 4 * 256 * 256 * 4 * 6
    floor = ratio * dense + keys_and_values
    # Above the floor: the residual stream and the rows of one layer at work, and the masks of selected queries.
    assert floor <= saved <= floor + 0.13 * dense


@pytest.mark.slow
def test_a_4_bit_weight_takes_half_a_byte_and_its_share_of_the_scales() -> None:
    settings: dict[str, Any] = {"method": "lora", "precision": "bf16"}
    whole = plan_of(paper_request(**settings))
    coded = plan_of(paper_request(load_in_4bit=True, **settings))
    assert coded.num_parameters == whole.num_parameters
    in_blocks = 4 * (4 * 128 * 128 + 3 * 128 * 256)
    assert whole.parameter_bytes - coded.parameter_bytes == (2 - 0.5) * in_blocks
    scales = in_blocks / 64 * (1 + 4 / 256)
    tables = 4 * 7 * (16 + 256 + 1) * 4
    assert whole.peak.parameters - coded.peak.parameters == pytest.approx(1.5 * in_blocks - scales - tables, abs=64)


def test_adapters_are_all_that_trains() -> None:
    plan = plan_of(paper_request(method="lora", lora_rank=8))
    per_block = 8 * (4 * (128 + 128) + 3 * (128 + 256))
    assert plan.num_trainable_peak == 4 * per_block
    assert (plan.gradient_bytes, plan.state_bytes) == (4 * 4 * per_block, pytest.approx(8 * 4 * per_block, rel=1e-3))


def test_the_json_has_the_promised_fields_and_they_add_up() -> None:
    plan = plan_of(paper_request(precision="mixed_hi", **SIZES))
    found = plan.to_json()
    peak = found["peak"]
    parts = ("parameter_bytes", "gradient_bytes", "state_bytes", "residual_bytes")
    assert sum(peak[part] for part in parts) == peak["total_bytes"] == found["peak_bytes"] == plan.peak_bytes
    assert found["num_trainable_peak"] == max(group["num_parameters"] for group in found["groups"])
    assert sum(group["num_parameters"] * len(group["indices"]) for group in found["groups"]) == found["num_parameters"]
    assert found["parameter_bytes"] == 2 * found["num_parameters"] + 4 * found["num_trainable_peak"]
    assert {"host_bytes", "disk_bytes", "notes", "request", *parts} < found.keys()


SIZES: dict[str, Any] = {"batch_size": 2, "seq_length": 64}


def every_peak(request: PlanRequest) -> dict[int, int]:
    """The peak of every group, run one by one; in what each leaves out only the state of others is missing."""
    model = build_model(request, LLAMA)
    with without_data():
        give_sizes(model)
        with attached(request, model):
            batch = make_batch(request, LLAMA)
            run = HiFTRun(model, request)
            return {
                group.index: max(step.peak[0].device for step in run.measure(group, lambda: model(**batch).loss))
                for group in run.optimizer.groups
            }


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "mixed_hi"},
        {"precision": "mixed_hi", "gradient_checkpointing": True},
        {"precision": "fp32", "stream_bytes": 0, "optimizer": "adagrad"},
        {"precision": "bf16", "chunked_cross_entropy": False, "gradient_checkpointing": True},
        {"precision": "mixed_hi", "token_ratio": 0.3},
    ],
)
def test_of_groups_alike_the_lowest_has_the_largest_peak(settings: dict[str, Any]) -> None:
    request = paper_request(**settings, **SIZES)
    peaks = every_peak(request)
    plan = plan_of(request)
    assert sorted(index for group in plan.groups for index in group.indices) == sorted(peaks)
    assert len(plan.groups) < len(peaks)
    for group in plan.groups:
        assert group.peak.total == max(peaks[index] for index in group.indices)
    assert plan.peak_bytes == max(peaks.values())


def test_groups_are_alike_by_kind_shape_and_dtype() -> None:
    model = build_model(paper_request(), LLAMA)
    groups = cut_groups(find_layers(model), 1, frozenset(name for name, _ in model.named_parameters()))
    assert [[group.index for group in found] for found in alike(groups, model)] == [[0], [1, 2, 3, 4], [5]]


def test_the_state_of_all_groups_stays_on_the_device_if_it_is_asked_to() -> None:
    plan = plan_of(paper_request(precision="mixed_hi", state="device", **SIZES))
    assert plan.host_bytes == 0
    # AdamW's two moments and the master, 12 bytes a parameter; and a step count a tensor.
    assert plan.peak.state >= 12 * plan.num_parameters


def test_state_that_is_thrown_away_after_a_turn_waits_for_one_group_at_a_time() -> None:
    request = paper_request(method="hift", precision="mixed_hi", batch_size=2, seq_length=64)
    groups = plan_of(request).groups
    largest = max(group.state_and_master_bytes for group in groups)
    # After a single update it is gone; in a longer turn the second update meets it.
    assert plan_of(replace(request, state="discard")).host_bytes == 0
    waiting = plan_of(replace(request, state="discard", steps_per_group=3)).host_bytes
    assert waiting == pytest.approx(largest, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"method": "sft", "density": 0.1}, {"packed": True}),
        ({"method": "sft", "density": 0.1}, {"sft_target_modules": ("q_proj",)}),
        ({"method": "lora"}, {"lora_target_modules": ("q_proj", "v_proj")}),
    ],
)
def test_settings_that_spare_memory_do_so_in_a_plan(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    request = paper_request(precision="bf16", batch_size=2, seq_length=64, **settings)
    assert plan_of(replace(request, **changes)).peak_bytes < plan_of(request).peak_bytes


def test_modules_that_are_not_there_get_no_adapters() -> None:
    request = paper_request(method="lora", lora_target_modules=("nowhere",), batch_size=1, seq_length=8)
    with pytest.raises(ValueError, match=r"lora_target_modules=\['nowhere'\] does not fit LlamaForCausalLM"):
        plan_of(request)


def test_what_is_stored_in_files_is_as_much_as_would_be_in_host_memory() -> None:
    on_host = plan_of(paper_request(precision="mixed_hi", **SIZES))
    on_disk = plan_of(paper_request(precision="mixed_hi", state="disk", **SIZES))
    assert on_disk.disk_bytes == on_host.host_bytes >= 12 * on_host.num_parameters
    largest = max(group.state_and_master_bytes for group in on_disk.groups)
    assert on_disk.host_bytes == pytest.approx(2 * largest, rel=0.01)
    in_memory = plan_of(paper_request(precision="mixed_hi", state="disk", state_ram_bytes=2**40, **SIZES))
    assert (in_memory.disk_bytes, in_memory.host_bytes) == (0, on_host.host_bytes)
    assert on_disk.peak == on_host.peak


@pytest.mark.parametrize(
    ("state_ram_bytes", "gradients"), [(0, "device"), (3_000_000, "device"), (0, "host"), (3_000_000, "host")]
)
def test_the_bytes_of_state_on_disk_are_those_of_a_real_run(
    state_ram_bytes: int, gradients: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"state": "disk", "state_ram_bytes": state_ram_bytes, "gradients": gradients}
    request = paper_request(precision="mixed_hi", **settings, **SIZES)
    plan, model = plan_of(request), real_model(request, LLAMA)
    own = StateCount()
    config = HiFTConfig.paper(state_dir=tmp_path, **settings)
    optimizer = HiFT(model, torch.optim.AdamW, config=config, lr=1e-3)
    for _ in range(optimizer.num_groups):
        model(**real_batch(request, LLAMA)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = own.num_bytes()
    assert (plan.host_bytes, plan.disk_bytes) == pytest.approx((found["host"], found["disk"]), rel=0.03)


@pytest.mark.parametrize("state", quick(["host", "disk", "device"], ["disk"]))
def test_checkpoints_that_are_kept_count_on_disk_with_the_one_that_is_written(state: Any) -> None:
    request = paper_request(precision="mixed_hi", state=state, **SIZES)
    without, kept = plan_of(request), plan_of(replace(request, save_total_limit=2))
    # Two bytes of a weight, four of its master, eight of its moments.
    assert kept.disk_bytes - without.disk_bytes == pytest.approx(3 * 14 * without.num_parameters, rel=0.01)
    assert kept.host_bytes == without.host_bytes
    assert any("2 checkpoints on disk" in note for note in kept.notes)
    assert any("--save_total_limit" in note for note in without.notes) == (state == "disk")


@pytest.mark.slow
def test_pieces_bound_what_state_takes_on_the_device() -> None:
    config = LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    whole = make_plan(paper_request(precision="mixed_hi", stream_bytes=0), config)
    pieces = make_plan(paper_request(precision="mixed_hi", stream_bytes=2**20), config)
    assert max(group.peak.state for group in pieces.groups) <= 2 * 2**20
    assert max(group.peak.state for group in whole.groups) > 8 * 2**20
    assert (whole.state_bytes, whole.gradient_bytes) == (pieces.state_bytes, pieces.gradient_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("stream_bytes", [2**20, 2**20 + 1])
def test_both_pieces_of_steps_in_the_backward_together_take_what_one_takes_otherwise(stream_bytes: int) -> None:
    config = LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    request = paper_request(precision="mixed_hi", stream_bytes=stream_bytes, seq_length=8)
    after = max(group.peak.state for group in make_plan(request, config).groups)
    within = max(group.peak.state for group in make_plan(replace(request, gradients="stepped"), config).groups)
    assert stream_bytes < after <= 2 * stream_bytes
    assert stream_bytes / 2 < within <= stream_bytes


@pytest.mark.parametrize("method", ["dense", "hift"])
def test_8_bit_state_is_that_of_the_trainer_whose_embeddings_have_32_bits(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GlobalOptimManager, "_instance", None)
    overrides = GlobalOptimManager.get_instance()  # type: ignore[no-untyped-call]
    overrides.index2config[0, 1] = {"optim_bits": 32}  # of another optimizer of this process
    kept = copy.deepcopy(vars(overrides))
    request = paper_request(method=method, optimizer="adamw8bit", seq_length=8)
    plan = make_plan(request, LLAMA)
    assert vars(overrides) == kept
    with without_trainer():
        assert make_plan(request, LLAMA).groups[0].state_bytes < plan.groups[0].state_bytes

    monkeypatch.setattr(GlobalOptimManager, "_instance", None)
    arguments = TrainingArguments(
        str(tmp_path), optim="adamw_bnb_8bit", max_steps=plan.num_groups, use_cpu=True, save_strategy="no"
    )
    ids = torch.arange(8)
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}])  # type: ignore[arg-type]
    if method == "hift":
        slivertune.attach(trainer, HiFTConfig.paper())
    trainer.train()
    optimizer: Any = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    by_weight: Any = optimizer.state_dict()["state"] if method == "hift" else optimizer.state
    tensors = [value for each in by_weight.values() for value in each.values() if isinstance(value, torch.Tensor)]
    assert sum(each.nbytes for each in tensors) == sum(each.state_bytes * len(each.indices) for each in plan.groups)


@pytest.mark.parametrize(
    ("optimizer", "resident", "bytes_per_weight"),
    [
        ("paged_adamw", "adamw", 8),
        ("paged_adamw8bit", "adamw8bit", 2),
    ],
)
def test_state_that_the_driver_pages_counts_in_host_memory(
    optimizer: Any, resident: Any, bytes_per_weight: int
) -> None:
    config = LlamaConfig(**{**LLAMA.to_dict(), "intermediate_size": 1024})
    paged = make_plan(paper_request(method="dense", optimizer=optimizer, batch_size=2, seq_length=64), config)
    other = make_plan(paper_request(method="dense", optimizer=resident, batch_size=2, seq_length=64), config)
    # Of the weights with fewer than 1e5 elements, and of scales, the state stays on the device.
    large = sum(each.numel() for each in build_model(paged.request, config).parameters() if each.numel() >= 100_000)
    assert paged.host_bytes == bytes_per_weight * large > 0 == other.host_bytes
    assert paged.peak.state + paged.host_bytes == pytest.approx(other.peak.state, rel=0.001)
    assert paged.peak_bytes == pytest.approx(other.peak_bytes - paged.host_bytes, rel=0.01)
    assert "unified memory" in paged.notes[-1]
    on_cpu = make_plan(
        paper_request(method="dense", optimizer=optimizer, kernels="cpu", batch_size=2, seq_length=64), config
    )
    assert on_cpu.host_bytes == 0
