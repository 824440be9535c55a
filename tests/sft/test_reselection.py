"""When weights are reselected, and under redistribution who gets how many."""

import weakref
from typing import Any

import pytest
import torch

from slivertune import SFTConfig
from slivertune.sft import reselection
from slivertune.sft.growth import GrowthEstimator
from slivertune.sft.reselection import Schedule, share_out
from slivertune.sft.weight import SparseWeight
from tests.helpers.models import SEQUENCE, small_decoder, tiny_gpt2, token_batches
from tests.sft.reference import NAMES, SHAPES, Prescribed, prescribed_gradients, reselection_times
from tests.sft.runs import sft_over, train


def request(scores: list[float], kept: int, share: int) -> tuple[torch.Tensor, int, int]:
    return torch.tensor(scores), share, kept


def test_the_highest_scores_win_over_all_tensors() -> None:
    requests = [request([9, 8, 1, 1], 4, 4), request([7, 6, 5, 2], 4, 4)]
    assert share_out(requests, 3) == [2, 1]
    assert share_out(requests, 5) == [2, 3]
    assert share_out(requests, 8) == [4, 4]


def test_no_tensor_falls_below_a_quarter_or_rises_above_four_times_its_share() -> None:
    requests = [request([1.0] * 20, 0, 4), request([9.0] * 20, 0, 4)]
    assert share_out(requests, 8) == [1, 7]
    assert share_out(requests, 19) == [3, 16]
    assert share_out([request([1.0] * 20, 1, 4), request([9.0] * 20, 14, 4)], 5) == [3, 2]


def test_the_total_is_kept_even_where_the_bounds_cannot_be() -> None:
    assert sum(share_out([request([1.0] * 20, 0, 1), request([9.0] * 20, 0, 1)], 30)) == 30


@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
def test_weights_move_to_the_tensor_with_the_larger_gradients(selection: str) -> None:
    model = Prescribed(SHAPES)
    before = {name: model.get_parameter(name).detach().clone() for name in NAMES}
    optimizer = sft_over(
        model,
        selection=selection,
        reselection_interval=6,
        estimation_steps=3,
        replacement_rate=0.5,
        targets=NAMES,
        redistribute=True,
    )
    shares = {name: delta.num_weights for name, delta in optimizer.deltas().items()}
    total = optimizer.num_weights
    for gradients in prescribed_gradients(30):
        gradients["first.weight"] = 5 * gradients["first.weight"]
        train(model, optimizer, [gradients])
        deltas = optimizer.deltas()
        assert optimizer.num_weights == total
        for name, delta in deltas.items():
            assert shares[name] / 4 <= delta.num_weights <= 4 * shares[name]
            idle = torch.ones(before[name].numel(), dtype=torch.bool)
            idle[delta.indices.long()] = False
            assert torch.equal(model.get_parameter(name).detach().flatten()[idle], before[name].flatten()[idle])
    counts = {name: delta.num_weights for name, delta in deltas.items()}
    assert counts["first.weight"] > 1.5 * shares["first.weight"]
    assert counts["second.weight"] < shares["second.weight"]


@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
@pytest.mark.parametrize("redistribute", [False, True])
@pytest.mark.parametrize("table", ["tokens", "positions"])
def test_nothing_grows_in_a_row_of_an_embedding_that_no_batch_has(
    table: str, redistribute: bool, selection: str
) -> None:
    name = {"tokens": "model.embed_tokens.weight", "positions": "transformer.wpe.weight"}[table]
    seen, density = {"tokens": (40, 0.2), "positions": (SEQUENCE, 0.1)}[table]
    model = small_decoder() if table == "tokens" else tiny_gpt2()
    num_rows, width = model.get_parameter(name).shape
    options = {"targets": [name.removesuffix(".weight")], "embeddings": True, "redistribute": redistribute}
    optimizer = sft_over(model, selection=selection, density=density, **options)

    def last_row() -> int:
        return int(optimizer.deltas()[name].indices.max()) // width

    assert last_row() == num_rows - 1 > seen, "the first, random choice knows of no gradient"
    train(model, optimizer, token_batches(13, vocab=40))  # two reselections
    assert last_row() < seen


def test_redistribution_catches_more_of_the_gradient() -> None:
    caught = []
    for redistribute in (False, True):
        model = Prescribed(SHAPES)
        optimizer = sft_over(
            model, reselection_interval=6, estimation_steps=3, targets=NAMES, redistribute=redistribute
        )
        mass = 0.0
        for gradients in prescribed_gradients(12):
            gradients["third.weight"] = 4 * gradients["third.weight"]
            train(model, optimizer, [gradients])
            if optimizer.updates > 3:
                mass += sum(
                    float(gradients[name].flatten()[delta.indices.long()].abs().sum())
                    for name, delta in optimizer.deltas().items()
                )
        caught.append(mass)
    assert caught[1] > 1.1 * caught[0]


@pytest.mark.parametrize("redistribute", [False, True])
def test_what_a_phase_held_is_freed_before_weights_are_replaced(
    redistribute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: dict[str, weakref.ref[GrowthEstimator]] = {}
    replace = reselection._replace

    def replaced(weight: SparseWeight, *arguments: Any) -> None:
        assert ended[weight.name]() is None
        replace(weight, *arguments)

    monkeypatch.setattr(reselection, "_replace", replaced)
    model = Prescribed(SHAPES)
    optimizer = sft_over(model, targets=NAMES, redistribute=redistribute, reselection_interval=20)
    for gradients in prescribed_gradients(4):
        model(gradients).backward()
        ended |= {each.name: weakref.ref(*each.estimators.values()) for each in optimizer._weights}
        optimizer.step()
    assert set(ended) == set(NAMES)


TOTAL = 100


@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
@pytest.mark.parametrize(("interval", "gamma"), [(20, 5), (6, 5), (7, 1), (100, 99), (101, 4)])
def test_reselections_come_when_the_paper_says(selection: str, interval: int, gamma: int) -> None:
    config = SFTConfig(selection=selection, reselection_interval=interval, estimation_steps=gamma)
    schedule = Schedule.of(config, TOTAL)
    wanted = reselection_times(selection, TOTAL, interval, gamma)
    assert [t for t in range(1, TOTAL + 1) if schedule.next_reselection(t - 1) == t] == wanted
    for end in wanted:
        in_phase = [t for t in range(1, TOTAL + 1) if end in schedule.open_phases(t - 1)]
        # The phase is the gamma updates up to and including the reselection.
        assert in_phase == ([] if selection == "momentum" else list(range(end - gamma + 1, end + 1)))
    assert {end for t in range(TOTAL) for end in schedule.open_phases(t)} <= set(wanted)


@pytest.mark.parametrize(("interval", "gamma"), [(20, 5), (6, 5), (7, 1), (9, 5), (10, 5)])
def test_candidates_may_have_been_grown_where_phases_overlap(interval: int, gamma: int) -> None:
    schedule = Schedule.of(SFTConfig(reselection_interval=interval, estimation_steps=gamma), TOTAL)
    times = reselection_times("accumulated_gradient", TOTAL, interval, gamma)
    for end in times:
        assert schedule.grew_in_phase(end) == any(end - gamma < other < end for other in times)
    assert any(schedule.grew_in_phase(end) for end in times) == (interval < 2 * gamma)


def test_the_first_replaces_all_and_the_others_ever_fewer() -> None:
    schedule = Schedule.of(SFTConfig(replacement_rate=0.2), TOTAL)
    assert schedule.num_replaced(5, 1000) == 1000
    assert [schedule.num_replaced(t, 1000) for t in (20, 40, 60, 80, 100)] == [160, 120, 80, 40, 0]
    momentum = Schedule.of(SFTConfig(selection="momentum", replacement_rate=0.5), TOTAL)
    assert [momentum.num_replaced(t, 1000) for t in (20, 40, 60)] == [1000, 300, 200]


def test_nothing_is_reselected_without_an_interval_or_after_the_end() -> None:
    for last in (5, 4):
        # The new weights would have learnt nothing at the end.
        assert Schedule.of(SFTConfig(estimation_steps=5), last).next_reselection(0) is None
    never = Schedule.of(SFTConfig(reselection_interval=0), TOTAL)
    assert never.next_reselection(0) is None and not never.open_phases(4)
    schedule = Schedule.of(SFTConfig(), TOTAL)
    assert schedule.next_reselection(100) is None
    assert not any(schedule.open_phases(t) for t in range(100, 200))


@pytest.mark.parametrize("total", [0, -1, 1.5, True, None])
def test_the_number_of_updates_must_be_known(total: object) -> None:
    with pytest.raises(ValueError, match=r"total_steps=.* must be a positive integer"):
        Schedule.of(SFTConfig(), total)  # type: ignore[arg-type]
