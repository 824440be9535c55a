"""Ranks that do other things than each other: an error on every rank, before anything is averaged or updated."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slivertune
from slivertune import SFT, HiFT, SFTConfig
from slivertune.parallel.consistency.headers import NO_GROUP, Header, Stage, find_difference, short_hash
from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.consistency.liveness import describe_end, own_identity
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce
from tests.helpers.models import differing, tiny_llama
from tests.helpers.ranks import run_ranks
from tests.parallel.ddp.test_gradient_sync import Sent, rows, shared
from tests.parallel.reference import ADAMW, batch_of, on_fsdp2_ranks, on_ranks, whole_weights

LAYOUTS: dict[str, Any] = {"DDP": on_ranks, "FSDP2": on_fsdp2_ranks}
Loop = Callable[["Training"], None]


def make_hift(model: nn.Module) -> Any:
    return HiFT(model, torch.optim.AdamW, **ADAMW)


def make_sft(model: nn.Module) -> Any:
    config = SFTConfig(density=0.05, reselection_interval=4, estimation_steps=2)
    return SFT(model, config=config, lr=1e-2, total_steps=40)


class Training:
    """A loop that the tests disturb on one rank."""

    def __init__(self, rank: int, accelerator: Any, make: Callable[[nn.Module], Any]) -> None:
        self.rank, self.accelerator = rank, accelerator
        model = tiny_llama()
        self.sliver = make(model)
        self.model, self.optimizer = slivertune.prepare(accelerator, model, self.sliver)
        self.batch = 0

    def backward(self) -> None:
        self.accelerator.backward(self.model(**batch_of(self.batch, 0, self.rank)).loss)
        self.batch += 1

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def update(self, count: int = 1) -> None:
        for _ in range(count):
            self.backward()
            self.step()

    def set(self, key: str, value: Any) -> None:
        self.optimizer.param_groups[0][key] = value


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def miss_a_step(training: Training) -> None:
    training.update(2)
    training.backward()
    if training.rank == 0:
        training.step()
    training.update(3)


def miss_a_backward(training: Training) -> None:
    training.update(2)
    if training.rank == 0:
        training.backward()
    training.step()


def miss_a_batch(training: Training) -> None:
    """One rank has a batch less and is never told, until the last."""
    training.update(2 if training.rank else 3)
    training.accelerator.end_training()


def lose_the_gradients(training: Training) -> None:
    training.update(2)
    training.backward()
    if training.rank:
        for parameter in training.model.parameters():
            parameter.grad = None
    training.step()


def another_rate(training: Training) -> None:
    """Set in mid-cycle, where HiFT holds the rate of the cycle: it is applied, and seen, when the next one begins."""
    training.update(2)
    if training.rank:
        training.set("lr", 0.02)
    training.update(5)


def another_decay(training: Training) -> None:
    training.update(2)
    if training.rank:
        training.set("weight_decay", 0.2)
    training.update(1)


def drift_until(end: Callable[[Training], Any]) -> Loop:
    def drift(training: Training) -> None:
        training.update(2)
        if training.rank:
            with torch.no_grad():
                training.model.get_parameter("model.norm.weight")[3] += 1e-4
        end(training)

    return drift


LOOPS: dict[str, Loop] = {
    "a step is missed": miss_a_step,
    "a backward pass is missed": miss_a_backward,
    "a batch is missed": miss_a_batch,
    "gradients are lost": lose_the_gradients,
    "another rate": another_rate,
    "another decay": another_decay,
}


def disturb(rank: int, num_ranks: int, folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for layout, made in LAYOUTS.items():
        for method, make in (("HiFT", make_hift), ("SFT", make_sft)):
            loops = dict(LOOPS)
            if layout == "FSDP2":
                # A backward pass takes part in FSDP2's own collectives, whatever we do.
                loops.pop("a backward pass is missed")
            if method == "SFT":
                loops.pop("gradients are lost")
                loops.pop("a backward pass is missed", None)
            elif layout == "DDP":
                loops["drift, saved"] = drift_until(lambda training: training.accelerator.save_state(folder))
                loops["drift, ended"] = drift_until(lambda training: training.accelerator.end_training())
            for name, loop in loops.items():
                with made() as accelerator:
                    training = Training(rank, accelerator, make)
                    message = message_of(lambda loop=loop, training=training: loop(training))  # type: ignore[misc]
                    found[f"{layout}, {method}: {name}"] = {
                        "message": message,
                        "updates": training.sliver.updates,
                        "weights": whole_weights(training.model),
                    }
    found["unit"] = apart_in_the_gradient_sync(rank)
    return found


def apart_in_the_gradient_sync(rank: int) -> dict[str, Any]:
    """Groups of other sizes on each rank: gloo would abort the process at the first bucket."""
    model = shared()
    for parameter in model.layers[rank].parameters() if rank else [model.scale]:
        parameter.requires_grad_(False)
    heartbeat = Heartbeat("unit")
    BucketedAllReduce(
        model,
        list(model.parameters()),
        heartbeat,
        bucket_bytes=32,
        meet=lambda: heartbeat.meet(Header(Stage.GRADIENT_SYNC, 4, rank)),
    )
    with Sent() as sent:
        message = message_of(lambda: model(rows(rank))["loss"].backward())
    return {"message": message, "updates": len(sent.elements), "weights": {}}


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(disturb, 2, str(tmp_path_factory.mktemp("drift")), timeout_s=400, collective_timeout_s=20)


def assert_named(messages: list[dict[str, dict[str, Any]]], name: str, *parts: str, updates: int) -> None:
    for each in messages:
        assert all(part in each[name]["message"] for part in parts), each[name]["message"]
        assert each[name]["updates"] == updates
    # Nothing was averaged or updated by one rank alone.
    assert differing(messages[0][name]["weights"], messages[1][name]["weights"]) == []


@pytest.mark.parametrize("method", ["HiFT", "SFT"])
def test_a_rank_that_misses_a_step_is_named_before_the_others_have_made_it(
    messages: list[dict[str, dict[str, Any]]], method: str
) -> None:
    group = ", group 2" if method == "HiFT" else ""
    assert_named(
        messages,
        f"DDP, {method}: a step is missed",
        "the ranks are not at the same place",
        f"rank 0 is stepping the optimizer at update 2{group}",
        f"rank 1 is averaging gradients at update 2{group}",
        "nothing was shared or updated",
        updates=2,
    )
    assert_named(
        messages,
        f"FSDP2, {method}: a step is missed",
        f"rank 0 is stepping the optimizer at update 2{group}",
        f"rank 1 is beginning a forward pass at update 2{group}",
        updates=2,
    )


def test_a_rank_that_misses_a_backward_pass_is_named(messages: list[dict[str, dict[str, Any]]]) -> None:
    name = "DDP, HiFT: a backward pass is missed"
    assert_named(messages, name, "rank 0 is averaging gradients", "rank 1 is stepping the optimizer", updates=2)


@pytest.mark.parametrize(("layout", "doing"), [("DDP", "averaging gradients"), ("FSDP2", "beginning a forward pass")])
@pytest.mark.parametrize("method", ["HiFT", "SFT"])
def test_a_rank_with_fewer_batches_is_named_at_the_end(
    messages: list[dict[str, dict[str, Any]]], layout: str, doing: str, method: str
) -> None:
    name = f"{layout}, {method}: a batch is missed"
    assert_named(messages, name, f"rank 0 is {doing}", "rank 1 is saving or ending the training at update 2", updates=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_lost_its_gradients_is_named(messages: list[dict[str, dict[str, Any]]], layout: str) -> None:
    name = f"{layout}, HiFT: gradients are lost"
    assert_named(messages, name, "rank 0 is stepping", "with gradients; rank 1", "without a gradient", updates=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("method", "key", "updates"), [("HiFT", "the learning rate of param group 0", 5), ("SFT", "lr", 2)]
)
def test_rates_that_differ_are_never_applied(
    messages: list[dict[str, dict[str, Any]]], layout: str, method: str, key: str, updates: int
) -> None:
    said = f"{key} is 0.01 on rank 0, 0.02 on rank 1"
    assert_named(messages, f"{layout}, {method}: another rate", said, "the update was not made", updates=updates)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["HiFT", "SFT"])
def test_other_hyperparameters_that_differ_are_never_applied(
    messages: list[dict[str, dict[str, Any]]], layout: str, method: str
) -> None:
    assert_named(messages, f"{layout}, {method}: another decay", "weight_decay", "0.2 on rank 1", updates=2)


@pytest.mark.parametrize("end", ["saved", "ended"])
def test_a_weight_that_drifts_in_mid_cycle_is_named_where_the_run_is_kept(
    messages: list[dict[str, dict[str, Any]]], end: str
) -> None:
    for each in messages:
        message = each[f"DDP, HiFT: drift, {end}"]["message"]
        assert "the sum of the bits of model.norm.weight is" in message and "resume from it" in message


def test_groups_of_other_sizes_are_told_apart_before_the_first_bucket(
    messages: list[dict[str, dict[str, Any]]],
) -> None:
    name = "unit"
    said = ("rank 0 is averaging gradients at update 4, group 0", "rank 1 is averaging gradients at update 4, group 1")
    assert_named(messages, name, *said, updates=0)


def end_one_of_three(rank: int, num_ranks: int, how: str) -> str:
    heartbeat = Heartbeat("test")
    heartbeat.enter(3, "group 1")
    heartbeat.meet(Header(Stage.FORWARD, 3, 1))
    if rank == 2:
        if how == "dies":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    return message_of(lambda: heartbeat.meet(Header(Stage.GRADIENT_SYNC, 3, 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("dies", "rank 2 has ended"), ("stops", "rank 2 is stopped (SIGSTOP")])
def test_of_three_ranks_the_one_that_is_gone_is_named(how: str, said: str) -> None:
    # The limit of a collective is longer than three processes need to start on a busy machine; 90 s end all of it.
    first, second, _ = run_ranks(end_one_of_three, 3, how, may_die=(2,), timeout_s=90, collective_timeout_s=15)
    for message, other in ((first, 1), (second, 0)):
        assert "failed averaging gradients: this rank is at update 3, group 1" in message
        assert f"; {said}" in message and f"rank {other} has ended" not in message


def test_headers_of_many_ranks_show_the_odd_ones() -> None:
    same = [Header(Stage.STEPPING, 5, 1, settings=rank) for rank in range(20)]
    assert find_difference(same) is None
    odd = [*same[:17], Header(Stage.GRADIENT_SYNC, 4, 0, skipped=2, gradients=0), *same[18:]]
    said = find_difference(odd)
    assert said is not None
    assert "rank 0 is stepping the optimizer at update 5, group 1; rank 17 is averaging gradients" in said
    assert "at update 4, group 0, 2 turns skipped, without a gradient; ... (20 ranks)" in said
    assert Header(Stage.SAVING, 1).group == NO_GROUP and "group" not in Header(Stage.SAVING, 1).text()


def test_hashes_of_settings_fit_and_tell_values_apart() -> None:
    assert short_hash({"a": 1, "b": 2}) == short_hash({"b": 2, "a": 1}) < 2**63
    assert len({short_hash(each) for each in ({}, {"a": 1e-3}, {"a": 1e-3 + 1e-18}, {"b": 1e-3})}) == 4


def test_a_process_is_known_to_live_or_to_have_ended() -> None:
    own = own_identity()
    assert describe_end(own) is None
    machine, pid, started = own.split(" ")
    assert describe_end(f"{machine} {pid} {int(started) - 1}") == "has ended"  # its number was given anew
    assert describe_end(f"another/{machine} {pid} 0") is None
    child = os.fork()
    if child == 0:
        os._exit(0)
    time.sleep(0.2)
    assert describe_end(f"{machine} {child} {Path(f'/proc/{child}/stat').read_text().split()[21]}") == "has ended"
    os.waitpid(child, 0)
    assert describe_end(f"{machine} {child} 0") == "has ended"


def die_in(rank: int, num_ranks: int, layout: str, method: str, moment: str, folder: str) -> tuple[str, float]:
    with LAYOUTS[layout]() as accelerator:
        training = Training(rank, accelerator, make_hift if method == "HiFT" else make_sft)
        training.update(2)
        if rank == 1 and moment == "training":
            os._exit(1)
        if rank == 1:
            # After the ranks have compared their work and written what is ours.
            accelerator.register_save_state_pre_hook(lambda *_: os._exit(1))
        began = time.monotonic()
        call: Callable[[], Any] = training.update if moment == "training" else lambda: accelerator.save_state(folder)
        return message_of(call), time.monotonic() - began


@pytest.mark.parametrize(
    ("layout", "method", "moment", "doing"),
    [
        ("FSDP2", "SFT", "training", "beginning a forward pass"),
        ("FSDP2", "SFT", "saving", "completing a checkpoint"),
        ("DDP", "HiFT", "saving", "completing a checkpoint"),
    ],
)
def test_a_rank_that_dies_is_named_wherever_it_was(
    layout: str, method: str, moment: str, doing: str, tmp_path: Path
) -> None:
    (message, seconds), _ = run_ranks(die_in, 2, layout, method, moment, str(tmp_path / "saved"), may_die=(1,))
    assert f"rank 0 failed {doing}: this rank is at update 2" in message
    assert "; rank 1 has ended; rank 1 was last seen at update 2" in message
    assert seconds < 30  # of a timeout of 60
