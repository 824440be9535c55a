"""HiFT under DDP with a GradScaler, gradients on the host, and steps in the backward: only this layout has them.

Also another optimizer beside it, and running statistics, as under DistributedDataParallel.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.optimization import Adafactor

import slivertune
from slivertune import SFT, HiFT, HiFTConfig, SFTConfig
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.hift import tiled_steps
from slivertune.hift.rotation import Rotation
from slivertune.parallel.ddp import gradient_sync
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce
from slivertune.parallel.ddp.hift import share_hift
from tests.helpers.accelerator import one_device
from tests.helpers.models import LAYERS, differing, tiny_llama, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import naive_groups
from tests.parallel.reference import ADAMW, OneProcess, batch_of


def overflow_on_one_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    """fp32 weights under a GradScaler; at updates 2 and 6 the loss of rank 1 overflows."""
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), **ADAMW)
    share_hift(model, hift)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    scales = []
    for update in range(12):
        loss = model(**batch_of(update, 0, rank)).loss
        if rank == 1 and update in (2, 6):
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(hift)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(hift)
        scaler.update()
        model.zero_grad()
        scales.append(scaler.get_scale())
    return {"updates": hift.updates, "scales": scales, "weights": weights(model)}


def test_an_overflow_on_one_rank_skips_the_step_on_both() -> None:
    model = tiny_llama()
    alone = OneProcess(model, naive_groups(model, 1), ranks=2, max_norm=0.05, lr_of=lambda updates: 1.0)
    alone.run(12, skip=(2, 6))
    for each in run_ranks(overflow_on_one_rank, 2):
        assert each["updates"] == 10
        assert each["scales"] == [1024.0] * 2 + [512.0] * 4 + [256.0] * 6
        # Scaled by powers of two: the same bits.
        assert differing(each["weights"], weights(model)) == []


def gradients_on_the_host(rank: int, num_ranks: int) -> dict[str, Any]:
    """Two cycles of three micro-batches an update, clipped, with gradients on the host and on the device."""
    results: dict[str, Any] = {}
    for gradients in ("host", "device"):
        model = tiny_llama(torch.bfloat16)
        config = HiFTConfig.paper(gradients=gradients, layers_per_group=2, stream_bytes=20_000)  # type: ignore[arg-type]
        hift = HiFT(model, torch.optim.AdamW, config=config, **ADAMW)
        accelerator = SimpleNamespace(
            sync_gradients=True, register_save_state_pre_hook=lambda hook: None, end_training=lambda: None
        )
        share_hift(model, hift, accelerator)
        sent, start = 0, BucketedAllReduce._start

        def counted(self: Any, bucket: Any, start: Any = start) -> None:
            nonlocal sent
            sent += sum(stop - first for _, first, stop in bucket._parts)
            start(self, bucket)

        BucketedAllReduce._start = counted  # type: ignore[method-assign]
        norms = []
        try:
            for update in range(2 * hift.num_groups):
                for index in range(3):
                    accelerator.sync_gradients = index == 2
                    model(**batch_of(update, index, rank)).loss.backward()
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
                hift.step()
        finally:
            BucketedAllReduce._start = start  # type: ignore[method-assign]
        results[gradients] = {"weights": weights(model), "norms": norms, "sent": sent}
    return results


def test_gradients_on_the_host_are_exchanged_once_an_update_and_equal_those_of_the_device() -> None:
    for each in run_ranks(gradients_on_the_host, 2):
        host, device = each["host"], each["device"]
        assert differing(host["weights"], device["weights"]) == []
        assert host["norms"] == device["norms"] and min(host["norms"]) > 0.05
        assert host["sent"] == device["sent"] > 0


OF_ADAMW: dict[str, Any] = {"optimizer_class": torch.optim.AdamW, **ADAMW}
ADAFACTOR: dict[str, Any] = {
    "optimizer_class": Adafactor,
    "lr": 1e-2,
    "scale_parameter": False,
    "relative_step": False,
}
STEPPED: dict[str, dict[str, Any]] = {
    "bf16, masters": {"layers_per_group": 2},
    "fp32, whole tensors": {"layers_per_group": 2, "stream_bytes": 0},
    "bf16, all layers, Adafactor in tiles": {"layers_per_group": LAYERS, "state": "device", "master": "stochastic"},
    "bf16, reentrant checkpointing": {"layers_per_group": 2, "steps_per_group": 2},
    "bf16, tied": {"layers_per_group": 2},
}


@mock.patch.object(tiled_steps, "TILE_ELEMENTS", 500)
def in_a_backward(rank: int, num_ranks: int) -> dict[str, Any]:
    """Two cycles, stepped after the backward and in it; some of rank 1's batches do not reach the embedding."""
    results: dict[str, Any] = {}
    for name, settings in STEPPED.items():
        for gradients in ("stepped", "device"):
            model: Any = tiny_llama(torch.bfloat16 if "bf16" in name else torch.float32, tied="tied" in name)
            if "reentrant" in name:
                enable_checkpointing(model, {"use_reentrant": True})
            config = HiFTConfig.paper(gradients=gradients, **{"stream_bytes": 20_000, **settings})  # type: ignore[arg-type]
            hift = HiFT(model, **(ADAFACTOR if "Adafactor" in name else OF_ADAMW), config=config)
            with mock.patch.object(gradient_sync, "BUCKET_BYTES", 10_000):
                share_hift(model, hift)
            norms = []
            for update in range(2 * hift.cycle_length):
                with unreached(model.model.embed_tokens) if rank == 1 and update % 3 == 0 else nullcontext():
                    model(**batch_of(update, 0, rank)).loss.backward()
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
                hift.step()
            results[f"{name}, {gradients}"] = {"weights": weights(model), "norms": norms, "updates": hift.updates}
    return results


@contextmanager
def unreached(module: torch.nn.Module) -> Iterator[None]:
    """Cut the backward off above a module."""
    handle = module.register_forward_hook(lambda module, inputs, output: output.detach())
    yield
    handle.remove()


def test_steps_in_the_backward_wait_for_the_mean_and_give_the_bits_of_steps_after_it() -> None:
    for each in run_ranks(in_a_backward, 2):
        for name in STEPPED:
            stepped, after = each[f"{name}, stepped"], each[f"{name}, device"]
            assert differing(stepped["weights"], after["weights"]) == [], name
            assert stepped["norms"] == after["norms"] and min(after["norms"]) > 0
            assert stepped["updates"] == after["updates"] > 0


def above(rank: int, num_ranks: int) -> dict[str, Any]:
    """A cycle and a turn, the layers above stepping, too; then micro-batches."""
    model = tiny_llama()
    config = HiFTConfig.paper(gradients="stepped", inactive="above")
    hift = HiFT(model, torch.optim.AdamW, config=config, **ADAMW)
    with mock.patch.object(gradient_sync, "BUCKET_BYTES", 10_000):
        share_hift(model, hift)
    for update in range(LAYERS + 2):
        model(**batch_of(update, 0, rank)).loss.backward()
        hift.step()
    found = weights(model)
    with hift.accumulating(), pytest.raises(RuntimeError, match=r"one backward per update under DDP.*'host'"):
        model(**batch_of(0, 0, rank)).loss.backward()
    return {"weights": found, "after": differing(weights(model), found)}


def test_layers_above_step_by_their_means_and_micro_batches_are_refused() -> None:
    model = tiny_llama()
    rate = HiFTConfig().inactive_rate
    OneProcess(model, naive_groups(model, 1), ranks=2, lr_of=lambda updates: 1.0, above=rate).run(LAYERS + 2)
    for each in run_ranks(above, 2):
        assert differing(each["weights"], weights(model)) == each["after"] == []


def after_failures(rank: int, num_ranks: int) -> dict[str, Any]:
    """Updates after a beginning that failed, a mean that failed, and a second backward; and one that is refused."""
    found: dict[str, Any] = {}
    for name in ("whole", "begin", "mean", "second"):
        model: Any = tiny_llama()
        hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(gradients="stepped", layers_per_group=2), **ADAMW)
        with mock.patch.object(gradient_sync, "BUCKET_BYTES", 10_000):
            share_hift(model, hift)

        def update(index: int, model: Any = model, hift: HiFT = hift) -> None:
            model(**batch_of(index, 0, rank)).loss.backward()
            hift.step()

        update(0)
        if name == "begin":
            with (
                mock.patch.object(Rotation, "to_apply", side_effect=OSError("full")),
                pytest.raises(OSError, match="full"),
            ):
                update(1)
        if name == "mean":
            # The last means come when the backward has ended.
            failing = mock.patch.object(BucketedAllReduce, "_settle_all", side_effect=KeyboardInterrupt)
            with failing, pytest.raises(KeyboardInterrupt):
                update(1)
            model.zero_grad()
            with pytest.raises(RuntimeError, match=r"did not end.*Load the last checkpoint") as error:
                hift.step()
            found[name] = str(error.value)
            continue
        if name == "second":
            model(**batch_of(1, 0, rank)).loss.backward()
            with pytest.raises(RuntimeError, match="one backward per update"):
                model(**batch_of(1, 0, rank)).loss.backward()
            continue
        update(1)
        update(2)
        found[name] = weights(model)
    return found


def test_after_a_failure_under_ddp_the_next_update_is_whole_or_refused() -> None:
    for each in run_ranks(after_failures, 2):
        assert differing(each["begin"], each["whole"]) == []
        assert "weights of its group were stepped" in each["mean"]


def beside_another(rank: int, num_ranks: int) -> dict[str, Any]:
    """Two cycles, and SGD trains the head, which was frozen when HiFT was built; by the place of the gradients."""
    return {gradients: head_by_sgd([rank], share_hift, gradients) for gradients in ("device", "stepped", "host")}


def head_by_sgd(
    ranks: Sequence[int], share: Callable[[Any, HiFT], object], gradients: Any = "device"
) -> dict[str, torch.Tensor]:
    """The weights after updates by the mean over the batches of these ranks."""
    model: Any = tiny_llama()
    model.lm_head.requires_grad_(False)
    with pytest.warns(UserWarning, match="HiFT keeps them frozen"):
        hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(gradients=gradients), **ADAMW)
    share(model, hift)
    model.lm_head.requires_grad_(True)
    other = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="or train it by another optimizer"):
        model(**batch_of(0, 0, 0))
    for update in range(2 * hift.num_groups):
        for rank in ranks:
            (model(**batch_of(update, 0, rank)).loss / len(ranks)).backward()
        for each in (hift, other):
            each.step()
            each.zero_grad()
    return weights(model)


def test_weights_that_another_optimizer_trains_get_the_mean_gradient_too() -> None:
    expected = head_by_sgd([0, 1], lambda model, hift: None)
    assert "lm_head.weight" in differing(expected, weights(tiny_llama()))
    for found in run_ranks(beside_another, 2):
        # Halves are exact, and the sum of two has one order.
        assert [differing(found[gradients], expected) for gradients in ("device", "stepped", "host")] == [[]] * 3


class Normalized(torch.nn.Module):
    """A linear layer and a batch norm, twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.BatchNorm1d(5)) for _ in range(2)]
        self.layers = torch.nn.ModuleList(blocks)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows.square().mean()


def with_statistics(rank: int, num_ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    """The buffers after updates by HiFT, by SFT, and under DistributedDataParallel after the next forward's send."""
    found = {}
    for method in ("hift", "sft", "dense"):
        model = Normalized()
        with one_device(gradient_accumulation_steps=2) as accelerator:
            prepared: Any
            if method == "dense":
                prepared = torch.nn.parallel.DistributedDataParallel(model)
                optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
            else:
                hift = partial(HiFT, model, torch.optim.SGD, config=HiFTConfig.paper(layers_per_group="all"), lr=0.0)
                sft = partial(SFT, model, config=SFTConfig(density=0.5, targets=["layers.1.0"]), lr=0.0, total_steps=10)
                prepared, optimizer = slivertune.prepare(accelerator, model, hift() if method == "hift" else sft())
            for index in range(6):
                accelerator.gradient_state._set_sync_gradients(index % 2 == 1)
                rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * index + rank)) + rank
                with prepared.no_sync() if method == "dense" and index % 2 == 0 else nullcontext():
                    prepared(rows).backward()
                if index % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
            if method == "dense":
                prepared._sync_buffers()
            found[method] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found


def test_running_statistics_are_those_of_rank_0_after_each_step_as_under_distributed_data_parallel() -> None:
    results = run_ranks(with_statistics, 2)
    dense = results[0]["dense"]
    assert len(dense) == 6 and dense["layers.0.1.num_batches_tracked"] == 6
    for found in results:
        assert (
            differing(found["dense"], dense) == differing(found["hift"], dense) == differing(found["sft"], dense) == []
        )
