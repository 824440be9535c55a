"""HiFT on a pretended CUDA device: each pair of its settings has the bits of a dense model there, and no race."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.models import LAYERS
from tests.helpers.pairwise import Row, assert_has_every_legal_pair, pairwise_rows, row_params
from tests.hift import test_pairwise as on_cpu
from tests.pretended_cuda.on_device import on_device

FACTORS: dict[str, tuple[Any, ...]] = {
    **on_cpu.CONFIG,
    "layers_per_group": (1, 2, LAYERS),
    "order": ("bottom2up", "random"),
    "optimizer": ("AdamW", "SGD momentum", "AdamW8bit", "transformers Adafactor with lr"),
    "kernels": (None, "fused", "capturable"),
    "dtype": ("bf16", "fp32"),
    "blocks": ("none checkpointed", "all, reentrant", "all"),
    "accumulation": (1, 2),
}
"""What decides on copies; more values of the same settings are in the table of the CPU, whose kernels these are."""
ILLEGAL = (*on_cpu.ILLEGAL, *on_cpu.NOT_WITH_DTYPE)
NOT_OF_TORCH: tuple[Row, ...] = (
    *(
        {"optimizer": optimizer, "kernels": kernels}
        for optimizer in ("AdamW8bit", "transformers Adafactor with lr")
        for kernels in ("fused", "capturable")
    ),
    {"optimizer": "SGD momentum", "kernels": "capturable"},
)
"""Options that an optimizer does not have."""


def is_legal(row: Row) -> bool:
    return not any(pair.items() <= row.items() for pair in ILLEGAL + NOT_OF_TORCH)


def table(seed: int = 42) -> list[Row]:
    draw = random.Random(seed)
    names = draw.sample(list(FACTORS), len(FACTORS))
    rows = pairwise_rows({name: draw.sample(FACTORS[name], len(FACTORS[name])) for name in names}, is_legal)
    return [{name: row[name] for name in FACTORS} for row in rows]


ROWS = table()


@contextmanager
def loads_counted() -> Iterator[Counter[str]]:
    """Count the loads of chunks that prefetching begins, and the most chunks of a group."""
    import torch

    from slivertune.core.copy_streams import Event
    from slivertune.hift.device_slots import DeviceSlots
    from slivertune.hift.offloaded_state import OffloadedState

    counts: Counter[str] = Counter()
    take, end = DeviceSlots.take, OffloadedState.end

    def counted_take(self: DeviceSlots, num_bytes: int, at_least: int) -> tuple[torch.Tensor, Event] | None:
        taken = take(self, num_bytes, at_least)
        # A backward and a step ask for at least the chunks that a step works on, whatever the budget of prefetching.
        counts["prefetched"] += taken is not None and at_least == 0
        return taken

    def counted_end(self: OffloadedState) -> None:
        counts["chunks of the largest group"] = max(counts["chunks of the largest group"], len(self.chunks))
        end(self)

    with (
        mock.patch.object(DeviceSlots, "take", counted_take),
        mock.patch.object(OffloadedState, "end", counted_end),
    ):
        yield counts


def found_of(row: Row, folder: Path, is_planted: bool = False) -> dict[str, Any]:
    """Train on the device by a row's settings, and a dense model there; both on the device's own process."""
    import torch
    from torch.optim.lr_scheduler import LambdaLR

    from tests.hift.cases import warm_cosine
    from tests.pretended_cuda.detector import Detector
    from tests.pretended_cuda.races import planted

    with torch.compiler.set_stance("force_eager"):  # bitsandbytes compiles its kernels otherwise
        with planted() if is_planted else nullcontext(), loads_counted() as loads, Detector() as found:
            whole = on_cpu.Run(row, folder, device="cuda")
            cycle, turn = whole.hift.cycle_length, row["steps_per_group"]
            last = cycle + on_cpu.MORE * turn
            losses, active = whole.train(range(last))
            exact = whole.model.state_dict()
            whole.hift.detach()
        dense: Any = on_cpu.made(row).to("cuda")
        naive = on_cpu.reference(row, dense, active[:cycle:turn])
        schedule = LambdaLR(naive.carrier, lambda step: warm_cosine(step, 30))
        expected, _ = on_cpu.train(dense, naive, schedule, row, range(last), "cuda")
    weights = getattr(naive, "exact", naive.parameters)
    differing = [name for name, value in weights.items() if not torch.equal(exact[name].cpu() + 0, value.cpu() + 0)]
    return {
        "same losses": losses == expected,
        "differing": differing,
        "races": dict(found.races),
        "unpinned": dict(found.unpinned),
        "on autograd's threads": found.num_on_autograd_threads,
        "copied on side streams": found.side_copies(),
        "loads": dict(loads),
        "registered": found.registered_bytes,
    }


def test_the_rows_have_every_legal_pair() -> None:
    assert_has_every_legal_pair(ROWS, FACTORS, is_legal)


@pytest.mark.parametrize("row", row_params(ROWS))
def test_bits_are_those_of_a_dense_model_and_nothing_races(row: Row, tmp_path: Path) -> None:
    found = on_device(found_of, row, tmp_path)
    assert found["races"] == {} and found["unpinned"] == {}
    assert found["same losses"] and found["differing"] == []
    assert found["on autograd's threads"] > 100
    copied, loads = found["copied on side streams"], found["loads"]
    comes_back = row["state"] in ("host", "disk") or (row["state"] == "discard" and row["steps_per_group"] > 1)
    if comes_back or row["gradients"] == "host":
        assert min(copied.values()) > 0 < found["registered"]
    elif row["gradients"] == row["weights"] == "device":
        assert max(copied.values()) == 0
    if comes_back:
        # SGD's chunks have the least state for an element, so there are fewer of them.
        least = 1 if row["optimizer"] == "SGD momentum" else 2
        assert loads["chunks of the largest group"] > least or not row["stream_bytes"]
        is_cut = row["stream_bytes"] and row["optimizer"] != "transformers Adafactor with lr"
        if row["prefetch_bytes"] != 60_000 or is_cut:  # else a chunk may be larger than that
            assert bool(loads["prefetched"]) == bool(row["prefetch_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("row", row_params(ROWS))
def test_a_race_that_is_planted_in_a_row_is_reported(row: Row, tmp_path: Path) -> None:
    assert on_device(found_of, row, tmp_path, True)["races"]


def counts_after_an_error(steps_per_group: int) -> tuple[list[float], bool]:
    """Step counts after an update that fails in the middle of a chunk, and whether all state is finite."""
    import torch

    from slivertune.hift.offload_buffer import StateStore
    from tests.helpers.models import small_decoder
    from tests.hift.cases import hift_over
    from tests.pretended_cuda.programs import batches, trained

    received, receive = [], StateStore.receive

    def fail_at_the_second(self: Any, one: Any, state: Any) -> Any:
        received.append(one)
        if len(received) == 2:
            raise KeyboardInterrupt
        return receive(self, one, state)

    model, hift = hift_over(
        small_decoder(torch.bfloat16).to("cuda"),
        "AdamW",
        fused=True,
        prefetch_bytes=10**9,
        layers_per_group=LAYERS,
        steps_per_group=steps_per_group,
    )
    trained(model, hift, "cuda", 2)
    model(**next(batches("cuda"))).loss.backward()
    with mock.patch.object(StateStore, "receive", fail_at_the_second), pytest.raises(KeyboardInterrupt):
        hift.step()
    states = [state for group in hift.turns.states for state in group.export().values()]
    finite = all(bool(value.isfinite().all()) for state in states for value in state.values())
    return sorted({float(state["step"]) for state in states}), finite


@pytest.mark.parametrize("steps_per_group", [1, 3])
def test_an_error_between_two_slices_leaves_each_as_it_was_or_as_it_was_stepped(steps_per_group: int) -> None:
    counts, is_finite = on_device(counts_after_an_error, steps_per_group)
    assert {*counts} <= {2.0, 3.0} and is_finite
