"""SFT on a bare engine of DeepSpeed's ZeRO: schedules, models that are born in parts, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from slivertune.parallel.initialize import initialize
from slivertune.parallel.zero.unsupported import check_sft_config
from tests.helpers.models import tiny_llama
from tests.helpers.ranks import run_ranks
from tests.parallel.contract.runs import message_of, refusal_of, running
from tests.parallel.contract.sft import SFTCase, assert_near_one_process
from tests.parallel.reference import whole_weights

BARE = SFTCase(accumulation=2, clip=2.0, bare=True)
LLAMA = SFTCase(model="llama", density=0.25, updates=6, bare=True)
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.5, "warmup_num_steps": 9}}


class Born(SFTCase):
    """A model that is partitioned as it is made."""

    def build_model(self, seed: int = 0) -> nn.Module:
        import deepspeed

        with deepspeed.zero.Init(config_dict_or_path=self.engine_config(3)):
            return super().build_model(seed)


BORN = Born(model="llama", density=0.25, updates=6, bare=True)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "offload_optimizer": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "SFT steps its few deltas by itself",
    ),
    # DeepSpeed itself refuses float16 on a CPU, in other words.
    "fp16": ({"fp16": {"enabled": True}}, "whose range is too small for trained weights"),
    "nvme": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
        "leaves no weights in memory",
    ),
    "stage 0": ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0, and SFT on DeepSpeed needs"),
}
"""Changes of a config, and what is said to them."""
SAID = {
    **{what: said for what, (_, said) in REFUSED.items()},
    "embeddings under ZeRO-3": "ZeRO-3 shards the weights, so layers have to add the deltas",
    "another model": "the SFT was built over another model than the one that was passed",
}


def save_around_an_evaluation(rank: int, num_ranks: int, folder: Path) -> int:
    """Save the deltas right after training, and after a forward that left weights behind on their way.

    Returns:
        How many weights were on their way.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    with running(LLAMA, "zero3", rank) as run:

        def evaluate() -> None:
            run.model.eval()
            with torch.no_grad():
                LLAMA.loss(run.model, LLAMA.batch(0, 0, rank))
            run.model.train()

        evaluate()  # what it gathers is what later evaluations gather ahead of time
        run.train(0, 3)
        run.sliver.save_pretrained(folder / "before")
        evaluate()
        states = [parameter.ds_status for parameter in run.plain.parameters()]
        run.sliver.save_pretrained(folder / "after")
    return states.count(ZeroParamStatus.INFLIGHT)


def rates_of_a_schedule(rank: int, num_ranks: int) -> list[tuple[float, float]]:
    rates = []
    with running(replace(BARE, engine={"scheduler": WARMUP}), "zero2", rank) as run:
        for update in range(3):
            run.train(update, update + 1)
            rates.append((run.sliver.param_groups[0]["lr"], run.model.get_lr()[0]))
    return rates


def train_born(rank: int, num_ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights at first, and the result."""
    with running(BORN, "zero3", rank) as run:
        return whole_weights(run.plain), run.train(0, BORN.updates).case.result(run)


def refuse(rank: int, num_ranks: int, what: str) -> str:
    if what == "embeddings under ZeRO-3":
        return refusal_of(replace(LLAMA, settings={"embeddings": True}), "zero3", rank)
    if what == "another model":
        _, sft = LLAMA.build()
        return message_of(lambda: initialize(model=tiny_llama(), optimizer=sft, config=LLAMA.engine_config(2)))
    return refusal_of(replace(BARE, engine=REFUSED[what][0]), "zero2", rank)


@pytest.mark.slow
def test_the_schedule_of_the_config_drives_the_rate() -> None:
    for rates in run_ranks(rates_of_a_schedule, 2):
        own, scheduled = zip(*rates, strict=True)
        assert own == scheduled and len(set(own)) == 3


@pytest.mark.slow
def test_a_model_that_was_born_in_parts_is_trained_alike() -> None:
    (born, first), (_, second) = run_ranks(train_born, 2)
    assert first["updates"] == second["updates"] == LLAMA.updates
    assert_near_one_process([first, second], LLAMA, born)


@pytest.mark.slow
def test_deltas_are_saved_after_an_evaluation_as_before_it(tmp_path: Path) -> None:
    assert all(run_ranks(save_around_an_evaluation, 2, tmp_path)), "nothing was in flight"
    with (
        safe_open(tmp_path / "before" / "sft_delta.safetensors", "pt") as before,
        safe_open(tmp_path / "after" / "sft_delta.safetensors", "pt") as after,
    ):
        # safetensors writes metadata in any order, so that the bytes of two files, and the hash of them, may differ.
        texts = [{**each.metadata(), "file_sha256": None} for each in (before, after)]
        assert texts[0] == texts[1], "hashes of the base included"
        assert before.keys() == after.keys()
        assert all(torch.equal(before.get_tensor(name), after.get_tensor(name)) for name in before.keys())  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize("what", SAID)
def test_what_does_not_go_together_is_refused_before_anything_is_built(what: str) -> None:
    assert all(SAID[what] in message for message in run_ranks(refuse, 2, what))


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("zero_optimization", {"stage": 2, "zenflow": {"topk_ratio": 0.1}}),
        ("zero_optimization", {"stage": 3, "zero_quantized_nontrainable_weights": True}),
        ("zero_optimization", {"stage": 3, "zero_quantized_weights": True}),
        ("checkpoint", {"load_universal": True}),
    ],
)
def test_settings_that_sft_cannot_keep_are_refused_by_name(section: str, settings: dict[str, Any]) -> None:
    name = f"{section}.{list(settings)[-1]}"
    with pytest.raises(ValueError, match=rf"{name}=.* does not go together with SFT"):
        check_sft_config({"zero_optimization": {"stage": 2}, section: settings})
