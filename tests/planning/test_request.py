from typing import Any

import pytest

from tests.helpers.plan_requests import paper_request

NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO", "zero2": "ZeRO", "zero3": "ZeRO"}


KBIT = {"method": "lora", "load_in_4bit": True, "precision": "bf16", "recipe": "peft-kbit"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "method='magic' must be one of 'dense', 'hift', 'sft', 'lora'"),
        ({"optimizer": "adam"}, "optimizer='adam' must be one of"),
        ({"precision": "fp16"}, "precision='fp16' must be one of"),
        ({"optimizer": None}, "optimizer=None must be one of"),
        ({"batch_size": None}, "batch_size=None must be an integer"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"seq_length": 1.5}, "seq_length=1.5 must be an integer"),
        ({"stream_bytes": -1}, "stream_bytes=-1 must be at least 0"),
        ({"token_ratio": 0.0}, r"token_ratio=0.0 must be more than 0 and at most 1"),
        ({"reselection_interval": -1}, "reselection_interval=-1 must be at least 0"),
        ({"estimation_steps": 0}, "estimation_steps=0 must be at least 1"),
        ({"replacement_rate": 1.5}, r"replacement_rate=1.5 must be at least 0 and at most 1"),
        (
            {"method": "sft", "reselection_interval": 5},
            "reselection_interval=5 must be greater than estimation_steps=5",
        ),
        ({"method": "sft", "density": 0.1, "num_weights": 3}, "density and num_weights set the same thing"),
        ({"sft_momentum": 0.5}, "sft_momentum=0.5 is for SM3"),
        ({"sft_momentum": 1.0, "selection": "momentum"}, r"sft_momentum=1.0 must be at least 0 and less than 1"),
        ({"lora_dropout": -0.1}, r"lora_dropout=-0.1 must be at least 0 and less than 1"),
        ({"lora_target_modules": ()}, r"lora_target_modules is empty\. Name modules, or leave it out"),
        ({"attn_implementation": "flash"}, "attn_implementation='flash' must be one of 'sdpa', 'eager'"),
        ({"state": "device", "prefetch_bytes": 9}, "prefetch_bytes=9 is for offloaded state"),
        ({"density": 1.1}, r"density=1.1 must be more than 0 and at most 1"),
        ({"method": "dense", "precision": "mixed_hi"}, "'mixed_hi' is HiFT's, and method='dense' keeps no masters"),
        ({"precision": "mixed_hi", "master": "none"}, "Use precision='bf16'"),
        ({"precision": "bf16", "master": "fp32"}, "Use precision='mixed_hi'"),
        ({"method": "sft", "optimizer": "sgd"}, "does not go with method='sft'"),
        ({"method": "hift", "load_in_4bit": True}, "--load_in_4bit does not go with --method hift"),
        (
            {"method": "lora", "load_in_4bit": True, "layout": "zero3", "num_gpus": 2},
            "--load_in_4bit does not go with ZeRO-3",
        ),
        ({"method": "lora", "load_in_4bit": True, "precision": "mixed"}, "computes in precision 'bf16' or 'fp32'"),
        ({"optimizer": "paged_adamw"}, "'paged_adamw' is planned for method='dense' and 'lora', on one"),
        (
            {"method": "dense", "optimizer": "paged_adamw8bit", "layout": "zero2", "num_gpus": 2},
            "on one GPU or under ddp. Use 'adamw' or 'adamw8bit'",
        ),
        ({"recipe": "peft"}, "recipe='peft' must be one of 'peft-kbit', 'peft-8bit', 'peft-loop'"),
        (
            {"method": "lora", "precision": "bf16", "recipe": "peft-kbit"},
            "recipe='peft-kbit' is LoRA by PEFT. Set method='lora' and precision='bf16', with load_in_4bit=True",
        ),
        (
            {"method": "lora", "recipe": "peft-loop"},
            "recipe='peft-loop' is LoRA by PEFT. Set",
        ),
        ({**KBIT, "token_ratio": 0.5}, "is a script without slivertune, which has no token_ratio=0.5"),
        ({**KBIT, "weights": "host"}, "is a script without slivertune, which has no weights='host'"),
        ({"precision": "mixed_hi", "master": "split"}, "'split' was removed: fp32 trains with the same bits"),
        (
            {"method": "dense", "gradients": "host"},
            "gradients='host' is read by HiFT, not by method",
        ),
        ({"gradients": "host", "state": "device"}, 'Use gradients="stepped", or state="host"'),
        (
            {"method": "dense", "weights": "host"},
            "weights='host' is read by HiFT, LoRA and SFT, not by method",
        ),
        ({"weights": "host", "state": "device"}, 'weights="host" saves. Use state="host" or "disk"'),
        ({"resident_bytes": 5}, 'resident_bytes=5 is for offloaded weights. Set weights="host"'),
        ({"weights": "host", "layout": "fsdp2", "num_gpus": 2}, "brings whole blocks to one device, and FSDP2 shards"),
        (
            {"layout": "fsdp2", "num_gpus": 2, "state": "disk", "state_ram_bytes": 2**30},
            "state_ram_bytes=1073741824 is for one device and DDP",
        ),
        ({"layout": "ddp"}, "layout='ddp' needs at least 2 GPUs, and num_gpus=1"),
        ({"num_gpus": 2}, "num_gpus=2 with layout='single'"),
        ({"layout": "zero2", "num_gpus": 2, "offload_parameters": True}, "Use layout='fsdp2' or 'zero3'"),
        *(
            (
                {"layout": layout, "num_gpus": 2, "gradients": "stepped"},
                f"and {name} shards their gradients. Set gradients='device', or use DDP",
            )
            for layout, name in NAMES.items()
            if layout != "ddp"
        ),
        (
            {"layout": "ddp", "num_gpus": 2, "gradients": "stepped", "gradient_accumulation_steps": 2},
            "one backward per update under DDP.*Use one micro-batch",
        ),
        (
            {"precision": "mixed_hi", "gradients": "stepped", "inactive": "above"},
            "bf16 weights .*master='fp32'.*Set master='stochastic'",
        ),
        *(
            (
                {"layout": layout, "num_gpus": 2, "optimizer": optimizer},
                rf"{kind} .*{name}.*Use torch.optim.AdamW \(adamw\).*or .*DDP",
            )
            for layout, name in NAMES.items()
            if layout != "ddp"
            for optimizer, kind in (("adamw8bit", "AdamW8bit"), ("adafactor", "Adafactor"))
        ),
        ({"layout": "zero1", "num_gpus": 2, "optimizer": "adagrad"}, "a new Adagrad .* or DDP or FSDP2"),
        ({"layout": "zero2", "num_gpus": 2, "state": "disk"}, 'Use state="host", or "device"'),
        (
            {"layout": "zero3", "num_gpus": 2, "precision": "bf16"},
            r"""Use master="fp32", .* \(precision='mixed_hi'\)""",
        ),
        ({"keep_activations": -1, "gradient_checkpointing": True}, "keep_activations=-1 must be at least 0"),
        ({"offload_activations": True}, "--offload_activations offloads .* Add --gradient_checkpointing true, or"),
        ({"token_tile_size": 0}, "token_tile_size=0 must be at least 1"),
        (
            {"token_tile_size": 512, "layout": "zero3", "num_gpus": 2},
            "--token_tile_size does not go with ZeRO-3: .* Use another layout",
        ),
        ({"keep_activations": 2}, "--keep_activations 2 spares blocks .* Add --gradient_checkpointing true, or leave"),
        (
            {"layout": "fsdp2", "num_gpus": 2, "method": "sft", "load_in_4bit": True},
            "Train 4-bit models under DDP, ZeRO-1 or ZeRO-2",
        ),
    ],
)
def test_what_can_not_be_planned_is_refused_with_a_way_out(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paper_request(**settings)


def test_masters_and_autocast_follow_from_the_precision() -> None:
    assert paper_request(precision="mixed_hi").master_kind == "fp32"
    assert paper_request(precision="bf16").master_kind == "none"
    assert [paper_request(precision="mixed").has_autocast, paper_request(precision="bf16").has_autocast] == [
        True,
        False,
    ]
    assert paper_request(method="lora", precision="bf16").has_autocast, "adapters are fp32"


def test_one_gpu_is_enough_where_parameters_wait_on_the_host() -> None:
    assert paper_request(layout="fsdp2", offload_parameters=True).num_gpus == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"layout": "ddp", "optimizer": "adamw8bit"},
        {"layout": "fsdp2", "optimizer": "adagrad"},
        {"layout": "zero3", "precision": "mixed_hi"},
        {"layout": "ddp", "method": "sft", "load_in_4bit": True},
        {"layout": "zero1", "method": "dense", "optimizer": "adagrad"},
    ],
)
def test_what_training_allows_in_a_layout_is_planned(settings: dict[str, Any]) -> None:
    assert paper_request(num_gpus=2, **settings).num_gpus == 2
