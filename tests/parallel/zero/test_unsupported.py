"""What HiFT refuses under DeepSpeed, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slivertune import HiFT, HiFTConfig
from slivertune.parallel.zero.unsupported import (
    check_engine_config,
    check_engine_optimizer,
    check_method,
    fill_buckets,
    fill_clipping,
)
from tests.helpers.models import tiny_llama


@pytest.mark.parametrize(
    ("config", "way_out"),
    [
        (HiFTConfig(state="disk", state_dir="somewhere"), 'use state="host", or "device"'),
        (HiFTConfig(state="discard"), 'use state="host", or "device"'),
        (HiFTConfig(master="none"), 'use master="fp32", or DDP or FSDP2'),
        (HiFTConfig(master="split"), 'use master="fp32", or DDP or FSDP2'),
    ],
)
def test_settings_that_mean_nothing_under_zero_are_refused(config: HiFTConfig, way_out: str) -> None:
    with pytest.raises(ValueError, match="is not available under ZeRO") as error:
        check_method(config, torch.optim.AdamW, "elements")
    assert way_out in str(error.value)
    check_method(HiFTConfig(state="device"), torch.optim.AdamW, "elements")


def test_a_piece_size_that_zero_does_not_use_is_said_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="stream_bytes=0 has no effect under ZeRO"):
        check_method(HiFTConfig(stream_bytes=0), torch.optim.AdamW, "elements")


def test_steps_inside_the_backward_are_refused() -> None:
    with pytest.raises(ValueError, match=r"step_in_backward=True updates a tensor before .* under ZeRO, leave it"):
        check_method(HiFTConfig(step_in_backward=True), torch.optim.AdamW, "elements")


@pytest.mark.parametrize(
    ("optimizer_class", "options", "reason"),
    [
        (torch.optim.Adafactor, {}, "looks at whole tensors"),
        (torch.optim.Adagrad, {}, "DeepSpeed builds a new Adagrad"),
    ],
)
def test_optimizers_that_flat_shares_would_change_are_refused(
    optimizer_class: type, options: dict[str, Any], reason: str
) -> None:
    hift = HiFT(tiny_llama(), optimizer_class, lr=1e-3, **options)
    with pytest.raises(ValueError, match=reason):
        check_method(hift.config, hift.base.optimizer_class, hift.base.slicing.unit)


def test_eight_bit_optimizers_are_refused() -> None:
    import bitsandbytes

    hift = HiFT(tiny_llama(), bitsandbytes.optim.AdamW8bit, lr=1e-3)
    with pytest.raises(ValueError, match="would straddle tensors"):
        check_method(hift.config, hift.base.optimizer_class, hift.base.slicing.unit)


def test_an_optimizer_declared_elementwise_passes() -> None:
    check_method(HiFTConfig(elementwise=True), torch.optim.SGD, "elements")


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
        check_engine_config(change)


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
    assert check_engine_config(config) == stage


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
