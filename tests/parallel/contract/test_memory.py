"""What a rank holds and sends under every layout, counted by the ledger; HiFT's on ZeRO is in `zero/test_memory.py`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger, claim
from slivertune.parallel.ddp import gradient_sync
from tests.helpers.models import tiny_llama
from tests.helpers.ranks import ran_once
from tests.parallel.contract.hift import CYCLE, HiFTCase
from tests.parallel.contract.runs import LAYOUTS, ZERO, running
from tests.parallel.contract.sft import SFTCase

NUM_RANKS = 2
PIECE, BUCKET = 8_192, 3_000
IN_PIECES = HiFTCase(dtype=torch.bfloat16, settings={"stream_bytes": PIECE})
HELD: dict[Layout, tuple[int, float]] = {"ddp": (1, 1.2), "fsdp2": (NUM_RANKS, 1.25)}
"""Among how many ranks a layout shares the weights out, and how far the gaps stretch what lies on the host."""


def count_hift(rank: int, num_ranks: int, layout: Layout) -> dict[str, Any]:
    """The ledger's figures of the second cycle, with buckets and pieces that the formula can tell apart."""
    with mock.patch.object(gradient_sync, "BUCKET_BYTES", BUCKET), running(IN_PIECES, layout, rank) as run:
        run.train(0, CYCLE)
        groups = [[weight.parameter for weight in run.sliver.weights_of(index)] for index in range(CYCLE)]
        # Under FSDP2 a block is gathered whole, which is not counted among these.
        is_whole = layout == "ddp"
        buffers = sum(buffer.untyped_storage().nbytes() for buffer in run.model.buffers()) if is_whole else 0
        for parameter in (parameter for group in groups for parameter in group):
            claim(parameter, "parameters")
        gradients, states, highest = [], [], []
        with Ledger(*[run.model] * is_whole) as ledger:
            ledger.track(parameter.data for group in groups for parameter in group)
            parameters = ledger.current().parameters - buffers
            for update in range(CYCLE, 2 * CYCLE):
                ledger.reset_peak()
                run.backward(run.case.batch(update, 0, rank))
                own = [each.grad for each in run.model.parameters() if each.grad is not None]
                gradients.append(
                    (
                        sum(getattr(each, "to_local", each.detach)().nbytes for each in own),
                        sum(parameter.nbytes for parameter in groups[update % CYCLE]),
                    )
                )
                del own
                run.step()
                states.append(ledger.highest.state)
                highest.append(ledger.highest.gradients)
            after = ledger.current()
    share = sum(
        2 * -(-p.shape[0] // HELD[layout][0]) * p.numel() // p.shape[0] for p in tiny_llama(torch.bfloat16).parameters()
    )
    return {
        "parameters": parameters,
        "share": share,
        "gradients of each group": gradients,
        "most gradients": max(highest),
        "state": max(states),
        "after": after.state + after.gradients,
        "host": after.host,
    }


@contextmanager
def counted_bytes() -> Iterator[list[tuple[str, int]]]:
    """What this rank contributes to each collective meanwhile, by wrapping torch.distributed's functions."""
    sent: list[tuple[str, int]] = []
    with ExitStack() as patches:
        for name in ("all_reduce", "all_gather", "broadcast", "all_gather_object"):
            original = getattr(dist, name)

            def counted(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
                own = args[1] if _name == "all_gather" else args[0]
                sent.append((_name, own.nbytes if isinstance(own, torch.Tensor) else 0))
                return _original(*args, **kwargs)

            patches.enter_context(mock.patch.object(dist, name, counted))
        yield sent


SPARSE = SFTCase(model="llama", density=0.02, updates=11)


def count_sft(rank: int, num_ranks: int, layout: Layout) -> dict[str, Any]:
    """Bytes of state on this rank after each update, and what it sent in each."""
    # DeepSpeed's own collectives go the same way.
    with (
        running(SPARSE, layout, rank) as run,
        Ledger(tiny_llama()) as ledger,
        counted_bytes() if layout not in ZERO else nullcontext([]) as sent,
    ):
        run.sliver.claim_state()
        found: dict[str, Any] = {
            "held": {
                name: each.to_local().nbytes for name, each in run.model.named_parameters() if isinstance(each, DTensor)
            },
            "num_weights": run.sliver.num_weights,
            "dense bytes": sum(4 * size for size in run.sliver.num_elements.values()),
            "sent": [],
            "state": [],
        }
        for update in range(SPARSE.updates):
            del sent[:]
            run.train(update, update + 1)
            found["sent"].append(list(sent))
            found["state"].append(ledger.current().state)
        found["most gradients"] = ledger.highest.gradients
    return found


def state_of_one_process() -> tuple[list[int], int]:
    """Bytes of state after each update of a run in this process, and the weights that it trains."""
    found = []
    with Ledger(tiny_llama()) as ledger:
        model, sft = SPARSE.build()
        sft.claim_state()
        for update in range(SPARSE.updates):
            SPARSE.loss(model, SPARSE.batch(update, 0, 0)).backward()
            sft.step()
            found.append(ledger.current().state)
    return found, sft.num_weights


Figures = Callable[[Layout], list[dict[str, Any]]]
"""Gives what each rank of a layout has counted."""


@pytest.fixture(scope="module")
def of_hift() -> Figures:
    return ran_once(count_hift, NUM_RANKS)


@pytest.fixture(scope="module")
def of_sft() -> Figures:
    return ran_once(count_sft, NUM_RANKS)


@pytest.mark.parametrize("layout", HELD)
def test_a_rank_holds_its_weights_the_active_gradients_and_two_pieces(layout: Layout, of_hift: Figures) -> None:
    for figure in of_hift(layout):
        assert figure["parameters"] == figure["share"]  # 2 bytes a parameter, rows rounded up
        gradients = figure["gradients of each group"]
        assert all(held == expected > 0 for held, expected in gradients), gradients
        assert 0 < figure["state"] <= 2 * PIECE and figure["after"] == 0
        # fp32 master and two moments of 2-byte weights, each weight's count of steps, and gaps.
        assert 6 * figure["share"] <= figure["host"] <= HELD[layout][1] * 6 * figure["share"]


def test_under_ddp_gradients_take_two_buckets_more(of_hift: Figures) -> None:
    for figure in of_hift("ddp"):
        largest = max(expected for _, expected in figure["gradients of each group"])
        # With the counts, two bytes a part; gloo's thread lets go of a third a moment after it is done.
        assert largest < figure["most gradients"] <= largest + 3 * (BUCKET + 2 * 40)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_a_layout_shares_out_a_ranks_state_is_that_of_one_process(layout: Layout, of_sft: Figures) -> None:
    alone, num_weights = state_of_one_process()
    assert max(alone) > 40 * num_weights
    assert min(alone) <= 22 * num_weights + 4, "fp32 weights: 22 bytes, and the witness"
    assert [found["state"] for found in of_sft(layout)] == [alone] * NUM_RANKS


@pytest.mark.slow
def test_gradients_of_weights_that_do_not_train_are_never_there_together(of_sft: Figures) -> None:
    dense = max(4 * tensor.numel() for tensor in tiny_llama().parameters())
    for found in of_sft("ddp"):
        assert found["most gradients"] < found["dense bytes"] / 4 + 4 * dense


@pytest.mark.slow
def test_an_update_sends_little_more_than_the_trained_weights_gradient(of_sft: Figures) -> None:
    for found in of_sft("ddp"):
        count, sent = found["num_weights"], found["sent"]
        num_bytes = [sum(size for name, size in each if name != "all_gather_object") for each in sent]
        # Beside the gradient, a number a tensor says whether there is one, and before averaging and stepping each rank
        # tells in seven numbers where it is. Update 6 and 7 are in no phase.
        assert num_bytes[5] == num_bytes[6] == 4 * count + 4 * 21 + 2 * 7 * 8
        assert sorted(size for _, size in sent[5]) == [56, 56, 4 * count + 4 * 21]
        # In a phase the candidates' too: as many, and half as many more where two phases need spares.
        assert 8 * count < num_bytes[8] <= 2.5 * 4 * count
        # In its first update: positions (a pool of two for each weight), then the values at both ranks' positions.
        assert num_bytes[7] <= (4 + 8 + 16) * count + 1000 and num_bytes[7] < 0.6 * found["dense bytes"]
        assert max(size for each in sent for _, size in each) <= 12 * count


@pytest.mark.slow
def test_under_fsdp2_a_rank_holds_its_share_of_the_frozen_weights(of_sft: Figures) -> None:
    model = tiny_llama()
    expected = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    for found in of_sft("fsdp2"):
        assert found["held"].keys() == expected.keys()
        for name, size in found["held"].items():
            assert abs(size - expected[name] / 2) <= 4 * model.get_parameter(name)[0].numel(), name
        assert max(size for each in found["sent"] for _, size in each) <= 12 * found["num_weights"]
