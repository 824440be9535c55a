from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slivertune.training.ranks.processes import asks_for, check_processes, device_values


@pytest.fixture(autouse=True)
def no_launcher_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("values", "world_size", "has_gpu", "expected"),
    [
        ({}, 1, False, {}),
        ({"deepspeed": "zero2.json"}, 1, True, {}),
        ({}, 2, True, {"ddp_find_unused_parameters": False}),
        ({"ddp_find_unused_parameters": True}, 2, True, {"ddp_find_unused_parameters": True}),
        # Accelerate would let each of these train by itself.
        ({}, 2, False, {"ddp_find_unused_parameters": False, "use_cpu": True}),
        ({"use_cpu": True}, 2, True, {"ddp_find_unused_parameters": False, "use_cpu": True}),
    ],
)
def test_several_processes_get_what_they_need_to_find_each_other(
    values: dict[str, Any], world_size: int, has_gpu: bool, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert device_values(values, world_size) == expected


def test_deepspeed_on_cpus_talks_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    values = device_values({}, 2)
    assert (values["use_cpu"], values["ddp_backend"]) == (False, "gloo")


@pytest.mark.parametrize(
    ("variable", "engine", "other"),
    [("ACCELERATE_USE_DEEPSPEED", "deepspeed", "fsdp"), ("ACCELERATE_USE_FSDP", "fsdp", "deepspeed")],
)
def test_what_the_launcher_asks_for_counts_too(
    variable: str, engine: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = {"deepspeed": "zero2.json", "fsdp": "full_shard"}
    for value, asked in ((None, False), ("true", True), ("false", False)):
        if value is not None:
            monkeypatch.setenv(variable, value)
        assert asks_for(engine, {}) is asked and not asks_for(other, {})
        assert asks_for(engine, {engine: typed[engine]}) and not asks_for(other, {engine: typed[engine]})


def test_fsdp_without_gpus_is_refused_since_accelerate_would_fall_to_ddp() -> None:
    with pytest.raises(ValueError, match=r"accelerate shards weights only over GPUs\. Use DDP or DeepSpeed"):
        device_values({"fsdp": "full_shard"}, 2)


def test_processes_that_did_not_find_each_other_are_refused() -> None:
    training: Any = SimpleNamespace(world_size=1)
    check_processes(training, 1)
    with pytest.raises(ValueError, match=r"2 processes were started, and torch\.distributed has joined 1: each would"):
        check_processes(training, 2)
