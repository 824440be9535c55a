"""HiFT on ranks that nothing has prepared, that were prepared with other settings, or of which one vanishes."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slivertune
from slivertune import HiFT, HiFTConfig
from tests.helpers.models import differing, tiny_llama, token_batches, weights
from tests.helpers.ranks import run_ranks
from tests.parallel.reference import ADAMW, batch_of, on_fsdp2_ranks, on_ranks

ON_RANKS: dict[str, Any] = {"DDP": on_ranks, "FSDP2": on_fsdp2_ranks}


def message_of(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def step_unprepared(rank: int, num_ranks: int) -> dict[str, Any]:
    messages = {}
    for name in ("plain", "accelerator.prepare"):
        model = tiny_llama()
        hift = HiFT(model, torch.optim.AdamW, **ADAMW)
        with on_ranks() as accelerator:
            wrapped, optimizer = (
                (nn.parallel.DistributedDataParallel(model), hift)
                if name == "plain"
                else accelerator.prepare(model, hift)
            )
            wrapped(**batch_of(0, 0, rank)).loss.backward()
            messages[name] = message_of(optimizer.step)
        assert hift.updates == 0
    return messages


def disagree(rank: int, num_ranks: int) -> dict[str, str]:
    """Prepare with another thing different on rank 1 each time."""
    messages = {}
    models: list[nn.Module] = []
    for layout, made in ON_RANKS.items():

        def prepare(
            made: Any = made,
            weights_seed: int = 0,
            hidden_rank: bool = False,
            optimizer_class: type = torch.optim.AdamW,
            lr: float = 1e-2,
            **config: Any,
        ) -> None:
            model = tiny_llama(seed=weights_seed)
            if hidden_rank and rank:
                model.model.layers[1].mlp.gate_proj.requires_grad_(False)  # type: ignore[union-attr, index]
            with made() as accelerator:
                hift = HiFT(model, optimizer_class, config=HiFTConfig(**config), lr=lr)
                slivertune.prepare(accelerator, model, hift)
            models.append(model)

        with pytest.warns(UserWarning, match="HiFT keeps them frozen") if rank else pytest.MonkeyPatch.context():
            messages[f"{layout}, groups"] = message_of(lambda: prepare(hidden_rank=True))
        messages[f"{layout}, seed"] = message_of(lambda: prepare(order="random", seed=rank))
        messages[f"{layout}, same"] = message_of(lambda: prepare(order="random", seed=7))
        messages[f"{layout}, order"] = message_of(lambda: prepare(order="top2down" if rank else "bottom2up"))
        messages[f"{layout}, steps"] = message_of(lambda: prepare(steps_per_group=1 + rank))
        messages[f"{layout}, lr"] = message_of(lambda: prepare(lr=1e-2 * (1 + rank)))
        messages[f"{layout}, class"] = message_of(
            lambda: prepare(optimizer_class=torch.optim.Adam if rank else torch.optim.AdamW)
        )
        messages[f"{layout}, weights"] = message_of(lambda: prepare(weights_seed=rank))
        if layout == "DDP":
            messages["not those of rank 0"] = str(differing(weights(models[-1]), weights(tiny_llama(seed=0))))
        messages[f"{layout}, place of files"] = message_of(lambda: prepare(state="disk", state_dir=f"of-rank-{rank}"))
    return messages


def drift(rank: int, num_ranks: int) -> dict[str, Any]:
    """A weight of rank 1 changes behind everyone's back."""
    model = tiny_llama()
    with on_ranks() as accelerator:
        hift = HiFT(model, torch.optim.AdamW, **ADAMW)
        prepared, optimizer = slivertune.prepare(accelerator, model, hift)
        done = []

        def train() -> None:
            for update in range(20):
                accelerator.backward(prepared(**batch_of(update, 0, rank)).loss)
                optimizer.step()
                optimizer.zero_grad()
                done.append(update)
                if update == 5 and rank == 1:
                    with torch.no_grad():
                        model.get_parameter("model.embed_tokens.weight")[3, 4] += 1e-4

        return {"message": message_of(train), "updates": len(done)}


def messages_of(rank: int, num_ranks: int) -> dict[str, Any]:
    return {
        "without": step_unprepared(rank, num_ranks),
        "disagree": disagree(rank, num_ranks),
        "drift": drift(rank, num_ranks),
    }


@pytest.fixture(scope="module")
def messages() -> list[dict[str, Any]]:
    return run_ranks(messages_of, 2)


def test_a_step_on_ranks_that_were_not_prepared_names_what_to_call(messages: list[dict[str, Any]]) -> None:
    for each in messages:
        for way in ("plain", "accelerator.prepare"):
            for way_out in ("slivertune.prepare", "slivertune.initialize", "slivertune.attach"):
                assert each["without"][way].startswith("RuntimeError: HiFT runs on 2 ranks")
                assert way_out in each["without"][way]


@pytest.mark.parametrize("layout", ON_RANKS)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("groups", "disagree on group 2"),
        ("order", "disagree on config.order: 'bottom2up' on rank 0, 'top2down' on rank 1"),
        ("seed", "disagree on config.seed: 0 on rank 0, 1 on rank 1"),
        ("steps", "disagree on config.steps_per_group: 1 on rank 0, 2 on rank 1"),
        ("lr", "disagree on lr of param group 0: 0.01 on rank 0, 0.02 on rank 1"),
        ("class", "disagree on base optimizer"),
    ],
)
def test_settings_that_differ_are_named_at_prepare(
    messages: list[dict[str, Any]], layout: str, what: str, said: str
) -> None:
    for each in messages:
        message = each["disagree"][f"{layout}, {what}"]
        assert message.startswith("ValueError: the ranks disagree on") and said in message


def test_the_same_settings_pass(messages: list[dict[str, Any]]) -> None:
    for each in messages:
        assert [
            each["disagree"][f"{layout}, {what}"] for layout in ON_RANKS for what in ("same", "place of files")
        ] == [""] * 4


def test_ddp_sends_the_weights_of_rank_0_and_fsdp2_refuses_different_ones(messages: list[dict[str, Any]]) -> None:
    for each in messages:
        assert each["disagree"]["DDP, weights"] == ""
        assert each["disagree"]["not those of rank 0"] == "[]"
        assert "disagree on the bits of model.embed_tokens.weight" in each["disagree"]["FSDP2, weights"]


def test_a_weight_that_drifts_on_one_rank_ends_the_run_at_the_end_of_the_cycle(messages: list[dict[str, Any]]) -> None:
    # Changed when the embedding had had its second turn, so seen at the end of the third cycle, in its last step.
    for each in messages:
        assert each["drift"]["updates"] == 14
        assert "the ranks have drifted apart, at update 15" in each["drift"]["message"]
        assert "the sum of the weights' bits is" in each["drift"]["message"]


def die_in_training(rank: int, num_ranks: int, layout: str) -> tuple[str, float]:
    model = tiny_llama()
    with ON_RANKS[layout]() as accelerator:
        hift = HiFT(model, torch.optim.AdamW, **ADAMW)
        prepared, optimizer = slivertune.prepare(accelerator, model, hift)
        began = [0.0]

        def train() -> None:
            for update in range(6):
                began[0] = time.monotonic()
                if rank == 1 and update == 3:
                    os._exit(1)
                accelerator.backward(prepared(**batch_of(update, 0, rank)).loss)
                optimizer.step()
                optimizer.zero_grad()

        return message_of(train), time.monotonic() - began[0]


def test_a_rank_that_dies_under_ddp_is_named_at_once() -> None:
    message, seconds = run_ranks(die_in_training, 2, "DDP", may_die=(1,))[0]
    assert message.startswith("RuntimeError: rank 0 failed averaging gradients: this rank is at update 3, group 3")
    assert "rank 1 was last seen at update 3, group 3" in message
    assert seconds < 30  # of a timeout of 60


def test_a_rank_that_dies_under_fsdp2_is_named_at_once() -> None:
    message, seconds = run_ranks(die_in_training, 2, "FSDP2", may_die=(1,))[0]
    assert message.startswith("RuntimeError: rank 0 failed beginning a forward pass: this rank is at update 3, group 3")
    assert "rank 1 was last seen at update 3, group 3" in message
    assert seconds < 30


def test_one_process_needs_no_preparation() -> None:
    assert not dist.is_initialized()
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, **ADAMW)
    model(**token_batches(1)[0]).loss.backward()
    hift.step()
    assert hift.updates == 1 and not hift.uses_sidecar


def test_what_an_engine_steps_refuses_to_step_by_itself() -> None:
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, **ADAMW)
    hift.delegate_to("DeepSpeed's ZeRO-2")
    assert all(parameter.requires_grad for parameter in model.parameters())
    for call in (hift.step, hift.state_dict, lambda: hift.load_state_dict({"hift": {}})):
        with pytest.raises(RuntimeError, match="DeepSpeed's ZeRO-2 steps in HiFT's place"):
            call()
    before = weights(model)
    model(**token_batches(1)[0]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "hooks were left behind"
    assert weights(model).keys() == before.keys()


def test_a_placeholder_alone_does_not_resume_a_run() -> None:
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, **ADAMW)
    hift.use_sidecar("DDP")
    for batch in token_batches(3):
        model(**batch).loss.backward()
        hift.step()
    saved, whole = hift.state_dict(), hift.whole_state()
    assert hift._updates_in_placeholder(saved) == 3 and hift._updates_in_placeholder(whole) is None

    again = tiny_llama()
    resumed = HiFT(again, torch.optim.AdamW, **{**ADAMW, "lr": 5.0})
    resumed.use_sidecar("DDP")
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == ADAMW["lr"]
    again(**token_batches(1)[0]).loss.backward()
    with pytest.raises(RuntimeError, match=r"made after 3 updates, but HiFT's own state, .*, is of 0; load the whole"):
        resumed.step()
    assert resumed.updates == 0
    resumed.load_whole_state(whole)
    again(**token_batches(1)[0]).loss.backward()
    resumed.step()
    assert resumed.updates == 4


def test_a_state_that_is_no_placeholder_is_not_taken_for_one() -> None:
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, **ADAMW)
    plain = {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": []}
    assert hift._updates_in_placeholder(plain) is None
    hift.use_sidecar("DDP")
    for batch in token_batches(4):
        model(**batch).loss.backward()
        hift.step()
    placeholder = hift.state_dict()
    assert hift._updates_in_placeholder(placeholder) == 4
    hift.load_state_dict(placeholder)
    for batch in token_batches(2):  # only the first step after a load is held against it
        model(**batch).loss.backward()
        hift.step()
    assert hift.updates == 6
