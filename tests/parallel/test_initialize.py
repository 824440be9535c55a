"""`slivertune.initialize`: DeepSpeed's arguments, configs with "auto", schedules, and the example that shows it."""

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from slivertune.parallel.initialize import initialize, resolve_config
from tests.conftest import CHECKOUT
from tests.helpers.models import tiny_llama
from tests.helpers.ranks import run_ranks
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import message_of, quiet
from tests.parallel.reference import batch_of, halving

CASE = HiFTCase(bare=True)
AUTO: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def test_auto_means_the_models_dtype_and_width_no_accumulation_and_no_clipping() -> None:
    assert resolve_config(AUTO, tiny_llama(torch.bfloat16)) == {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 32 * 32},
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }
    assert resolve_config(AUTO, tiny_llama())["bf16"] == {"enabled": False}
    assert AUTO["gradient_clipping"] == "auto", "the caller's dictionary stays as it is"


def test_a_config_may_be_a_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(AUTO), encoding="utf-8")
    assert (
        resolve_config(path, tiny_llama())
        == resolve_config(str(path), tiny_llama())
        == resolve_config(AUTO, tiny_llama())
    )


def test_a_config_that_is_no_json_is_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text("{", encoding="utf-8")
    model = tiny_llama(torch.bfloat16)
    with pytest.raises(ValueError, match=re.escape(f"the DeepSpeed config {path} can't be read as JSON")):
        resolve_config(path, model)
    with pytest.raises(ValueError, match=r"^the DeepSpeed config can't be read as JSON"):
        resolve_config({"train_batch_size": torch.ones(1)}, model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_configs_of_the_presets_resolve_with_a_batch_size(stage: int) -> None:
    resolved = resolve_config(
        {
            **json.loads((CHECKOUT / "ds_configs" / f"zero{stage}.json").read_text(encoding="utf-8")),
            "train_micro_batch_size_per_gpu": 2,
        },
        tiny_llama(),
    )
    assert "auto" not in json.dumps(resolved)


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        ({**AUTO, "train_micro_batch_size_per_gpu": "auto"}, tiny_llama(), "Set train_micro_batch_size_per_gpu"),
        (AUTO, torch.nn.Linear(2, 2), r"and the model has no config\.hidden_size"),
    ],
    ids=["batch size", "width"],
)
def test_what_nobody_knows_is_asked_for(config: dict[str, Any], model: torch.nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_config(config, model)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config"], "needs a model"),
        (["model"], "needs DeepSpeed's config"),
        (["model", "config", "model_parameters"], "model_parameters are in the optimizer already"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(names: list[str], message: str) -> None:
    model = tiny_llama()
    arguments = {"model": model, "config": AUTO, "model_parameters": model.parameters()}
    with pytest.raises(ValueError, match=message):
        initialize(optimizer=CASE.build_optimizer(model), **{name: arguments[name] for name in names})


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = tiny_llama()
    optimizer = CASE.build_optimizer(model)
    model(**batch_of(0, 0, 0)).loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has already made 1 updates"):
        initialize(model=model, optimizer=optimizer, config=AUTO)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in batch_of(index, 0, 0).items()}


def use(rank: int, num_ranks: int) -> dict[str, Any]:
    quiet()
    results: dict[str, Any] = {}
    model = CASE.build_model()
    hift = CASE.build_optimizer(model)
    schedule = LambdaLR(hift, halving)
    # The config through `args`, as DeepSpeed's own launcher scripts have it, and the schedule as an instance.
    engine, optimizer, loader, scheduler = initialize(
        args=SimpleNamespace(local_rank=rank, deepspeed_config=CASE.engine_config(2)),
        model=model,
        optimizer=hift,
        training_data=Rows(),
        lr_scheduler=schedule,
    )
    loader.num_local_io_workers = 0  # processes that take longer to end than the batches to train on
    results["the optimizer and the schedule come back"] = optimizer is hift, scheduler is schedule
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            engine.backward(engine(**batch).loss)
            engine.step()
    results["no warning that the schedule is ahead"] = [
        str(each.message) for each in caught if "lr_scheduler" in str(each.message)
    ]
    results["updates, batches, and the group whose turn it is"] = hift.updates, len(loader), hift.active_group
    results |= {name: message_of(call) for name, call in {"step": hift.step, "state_dict": hift.state_dict}.items()}
    with torch.no_grad():
        engine(**batch_of(0, 0, 0))
    hift.detach()
    results["everything trains after detach"] = all(parameter.requires_grad for parameter in model.parameters())
    results["a backward after detach"] = message_of(lambda: engine.backward(engine(**batch_of(0, 0, rank)).loss))
    hift.reattach()
    engine.backward(engine(**batch_of(0, 0, rank)).loss)
    engine.step()
    results["updates and the active group after reattach"] = hift.updates, hift.active_group
    engine.destroy()
    results["reattach after destroy"] = message_of(hift.reattach)
    results["hooks that are left"] = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
    results["everything trains again"] = all(parameter.requires_grad for parameter in model.parameters())
    results["groups of another HiFT"] = CASE.build_optimizer(model).num_groups
    return results


def use_another_optimizer(rank: int, num_ranks: int) -> tuple[str, bool]:
    """What is given back, and whether the engine rotates."""
    quiet()
    model = CASE.build_model()
    engine, optimizer, _, _ = initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=CASE.engine_config(2)
    )
    found = type(optimizer).__name__, hasattr(engine, "hift_schedule")
    engine.destroy()
    return found


def use_without_clipping(rank: int, num_ranks: int) -> tuple[float, list[str]]:
    """The engine's norm, and what is said of it."""
    quiet()
    model = CASE.build_model()
    config = CASE.engine_config(1)
    del config["gradient_clipping"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = initialize(model=model, optimizer=CASE.build_optimizer(model), config=config)
    found = engine.gradient_clipping(), [str(each.message) for each in caught if "clip" in str(each.message)]
    engine.destroy()
    return found


EXPECTED: dict[str, Any] = {
    "the optimizer and the schedule come back": (True, True),
    # 16 rows, two a rank and step; the fifth update is group 4's.
    "updates, batches, and the group whose turn it is": (4, 4, 4),
    "no warning that the schedule is ahead": [],
    "everything trains after detach": True,
    "a backward after detach": "RuntimeError: the engine was to train after detach(), which ended HiFT. Call "
    "reattach() of the HiFT to go on, or engine.destroy() before another optimizer trains the model",
    "updates and the active group after reattach": (5, 0),
    "reattach after destroy": "RuntimeError: DeepSpeed's ZeRO-2 engine, which stepped in HiFT's place, was destroyed. "
    "Build a new HiFT",
    "groups of another HiFT": 5,
    "hooks that are left": 0,
    "everything trains again": True,
}
"""After eight rows a rank; hooks and what trains, after the engine is destroyed."""


@pytest.fixture(scope="module")
def used() -> list[dict[str, Any]]:
    return run_ranks(use, 2)


@pytest.mark.parametrize("what", EXPECTED)
def test_an_engine_is_used_and_destroyed(what: str, used: list[dict[str, Any]]) -> None:
    assert [rank[what] for rank in used] == [EXPECTED[what]] * 2


@pytest.mark.parametrize("call", ["step", "state_dict"])
def test_the_optimizer_itself_no_longer_steps(call: str, used: list[dict[str, Any]]) -> None:
    assert all("DeepSpeed's ZeRO-2 engine" in rank[call] for rank in used)


def test_any_other_optimizer_is_deepspeeds_own_affair() -> None:
    assert run_ranks(use_another_optimizer, 2) == [("DeepSpeedZeroOptimizer", False)] * 2


def test_a_config_without_clipping_does_not_clip_and_says_so() -> None:
    for norm, messages in run_ranks(use_without_clipping, 2):
        assert norm == 0.0
        assert len(messages) == 1 and "has no gradient_clipping" in messages[0]
