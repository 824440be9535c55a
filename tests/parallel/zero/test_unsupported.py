"""What HiFT refuses under DeepSpeed, before anything is built."""

from functools import partial
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


def test_a_piece_size_that_zero_does_not_use_is_said_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="stream_bytes=0 has no effect under ZeRO"):
        warn_of_stream_bytes(HiFTConfig.paper(stream_bytes=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_optimization": {"stage": 0}}, "needs stage 1, 2 or 3"),
        ({"zero_optimization": {}}, "needs stage 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            r"offload_optimizer .*DeepSpeedCPUAdam.* Remove it",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
            r"offload_param \(device 'nvme'\) leaves no weights in .*, and HiFT reads them there\. Use device 'cpu'",
        ),
        (
            {
                "zero_optimization": {"stage": 1},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            r"BF16_Optimizer, which can't be rotated\. Use stage 2",
        ),
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}, "Remove the section from the config"),
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
    with pytest.raises(ValueError, match=r"BF16_Optimizer, which can't be rotated\. Use stage 2"):
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
    unsaid: dict[str, Any] = {}
    with pytest.warns(UserWarning, match="DeepSpeed alone would clip at norm 1.0"):
        fill_clipping(unsaid)
    said: dict[str, Any] = {"gradient_clipping": 0.7}
    fill_clipping(said)
    assert (unsaid, said) == ({"gradient_clipping": 0.0}, {"gradient_clipping": 0.7})


@pytest.mark.parametrize(
    ("build_model", "said", "bucket"),
    [
        (tiny_llama, {}, "auto"),
        (tiny_llama, {"reduce_bucket_size": 70_000}, 70_000),
        (partial(torch.nn.Linear, 2, 2), {}, None),
    ],
    ids=["unsaid", "said", "no width"],
)
def test_a_bucket_that_nobody_sized_goes_by_the_models_width(build_model: Any, said: Any, bucket: Any) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2, **said}}
    fill_buckets(config, build_model())
    assert config["zero_optimization"].get("reduce_bucket_size") == bucket
