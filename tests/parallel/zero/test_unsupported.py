"""What HiFT refuses under DeepSpeed, before anything is built; and ranks that don't agree."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from slivertune import HiFTConfig
from slivertune.parallel.zero.unsupported import (
    check_engine_optimizer,
    check_hift_config,
    fill_buckets,
    fill_clipping,
    warn_of_stream_bytes,
)
from tests.helpers.models import tiny_llama
from tests.helpers.ranks import run_ranks
from tests.parallel.zero.runs import Case, engine_config, make_model, make_optimizer, quiet


def test_a_piece_size_that_zero_does_not_use_is_said_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="stream_bytes=0 has no effect under ZeRO"):
        warn_of_stream_bytes(HiFTConfig(stream_bytes=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_optimization": {"stage": 0}}, "needs stage 1, 2 or 3"),
        ({"zero_optimization": {}}, "needs stage 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            r"offload_optimizer .*DeepSpeedCPUAdam.* remove it",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
            r"offload_param \(device 'nvme'\) leaves no part of .*, where HiFT reads them; use device 'cpu'",
        ),
        (
            {
                "zero_optimization": {"stage": 1},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            r"BF16_Optimizer, which can't be rotated; use stage 2",
        ),
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}, "remove the section from the config"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
            "zero_quantized_nontrainable_weights",
        ),
        ({"zero_optimization": {"stage": 2}, "hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled"),
        ({"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}, "autotp_size=2"),
    ],
)
def test_engine_settings_that_cannot_be_rotated_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_hift_config(change)


def test_an_optimizer_that_deepspeed_chose_by_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="BF16_Optimizer, which can't be rotated; use stage 2"):
        check_engine_optimizer("BF16_Optimizer")
    check_engine_optimizer("DeepSpeedZeroOptimizer")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ordinary_engine_settings_pass(stage: int) -> None:
    config = {
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "none"},
            "offload_param": {"device": "cpu"},
        },
        "bf16": {"enabled": "auto"},
        "tensor_parallel": {"autotp_size": 1},
        "data_types": {"grad_accum_dtype": None if stage == 1 else "fp32"},
    }
    assert check_hift_config(config) == stage


def test_a_config_without_clipping_does_not_clip_and_says_so() -> None:
    config: dict[str, Any] = {}
    with pytest.warns(UserWarning, match="DeepSpeed alone would clip at norm 1.0"):
        fill_clipping(config)
    assert config == {"gradient_clipping": 0.0}
    config = {"gradient_clipping": 0.7}
    fill_clipping(config)
    assert config == {"gradient_clipping": 0.7}


def test_a_bucket_that_nobody_sized_goes_by_the_models_width() -> None:
    unsaid: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    fill_buckets(unsaid, tiny_llama())
    assert unsaid["zero_optimization"]["reduce_bucket_size"] == "auto"
    said: dict[str, Any] = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 70_000}}
    fill_buckets(said, tiny_llama())
    assert said["zero_optimization"]["reduce_bucket_size"] == 70_000
    without_width: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    fill_buckets(without_width, torch.nn.Linear(2, 2))
    assert "reduce_bucket_size" not in without_width["zero_optimization"]


def disagree(rank: int, num_ranks: int) -> dict[str, str]:
    from slivertune.parallel import prepare
    from slivertune.parallel.initialize import initialize
    from tests.parallel.zero.runs import make_accelerator

    quiet()
    messages = {}
    differing = {
        "order": {"order": "random" if rank else "bottom2up"},
        "layers": {"layers_per_group": 1 + rank},
        "steps": {"steps_per_group": 1 + rank},
    }
    for name, change in differing.items():
        case = Case(stage=2, **change)
        model = make_model(case)
        try:
            prepare(make_accelerator(case), model, make_optimizer(model, case))
        except ValueError as error:
            messages[name] = str(error)
    case = Case(stage=2)
    model = make_model(case)
    config = engine_config(case)
    config["gradient_clipping"] = 0.1 * rank
    try:
        initialize(model=model, optimizer=make_optimizer(model, case), config=config)
    except ValueError as error:
        messages["config"] = str(error)
    return messages


def drift(rank: int, num_ranks: int) -> list[str]:
    """One rank's schedule goes its own way in the second cycle."""
    from tests.parallel.zero.runs import Run

    seen = []
    run = Run(Case(stage=2, bare=True), rank, num_ranks)
    run.train(6)
    if rank == 1:
        for group in run.hift.param_groups:
            group["lr"] *= 1.5
    try:
        run.train(6)
    except RuntimeError as error:
        seen.append(str(error))
    seen.append(str(run.hift.updates))
    return seen


def disagree_then_drift(rank: int, num_ranks: int) -> dict[str, Any]:
    return {"disagree": disagree(rank, num_ranks), "drift": drift(rank, num_ranks)}


@pytest.fixture(scope="module")
def quarrels() -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = run_ranks(disagree_then_drift, 2, env={"DS_ACCELERATOR": "cpu"}, timeout_s=600)
    return ranks


def test_ranks_with_other_settings_are_told_which_at_prepare(quarrels: list[dict[str, Any]]) -> None:
    for rank in quarrels:
        messages = rank["disagree"]
        assert "disagree on config.order: 'bottom2up' on rank 0, 'random' on rank 1" in messages["order"]
        assert "disagree on config.layers_per_group: 1 on rank 0, 2 on rank 1" in messages["layers"]
        assert "steps_per_group: 1 on rank 0, 2 on rank 1" in messages["steps"]
        assert "the DeepSpeed config's gradient_clipping: '0.0' on rank 0, '0.1' on rank 1" in messages["config"]


def test_rates_that_differ_are_found_before_they_are_applied(quarrels: list[dict[str, Any]]) -> None:
    for rank in quarrels:
        message, updates = rank["drift"]
        assert "the ranks have drifted apart" in message and "the learning rate of param group 0 is" in message
        assert updates == "6"


def lose_a_rank(rank: int, num_ranks: int) -> str:
    from tests.parallel.zero.runs import Run

    run = Run(Case(stage=2, bare=True), rank, num_ranks)
    run.train(2)
    if rank == 1:
        os._exit(1)
    try:
        run.train(2)
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


def test_a_rank_that_dies_is_named_with_where_it_was() -> None:
    options: dict[str, Any] = {"timeout_s": 120, "collective_timeout_s": 20, "may_die": (1,)}
    message = run_ranks(lose_a_rank, 2, env={"DS_ACCELERATOR": "cpu"}, **options)[0]
    assert "rank 0 failed in the backward of group 2: this rank is at update 2, group 2" in message
    assert "rank 1 was last seen at update 1, group 1" in message
