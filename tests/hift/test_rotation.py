import pickle
from typing import Any

import pytest
import torch

from slivertune.core.layers import Layer
from slivertune.hift.rotation import Rotation, count_per_group, cut_groups, turn_order


def advance(rotation: Rotation, scheduled: float) -> float:
    """Apply one update and return the learning rate that it used."""
    applied = rotation.to_apply([scheduled])
    rotation.advance(applied)
    (value,) = applied
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize(
    ("share", "num_layers", "number"),
    [(0.25, 34, 9), (0.25, 8, 2), (0.25, 3, 1), (0.1, 30, 3), (0.01, 5, 1), (0.5, 5, 3), (0.999, 4, 4), (3, 5, 3)],
)
def test_a_share_of_the_layers_is_rounded_up(share: float, num_layers: int, number: int) -> None:
    assert count_per_group(share, num_layers) == number


def test_every_group_has_its_turn_in_order() -> None:
    rotation = Rotation(order=(2, 0, 1), steps_per_group=3)
    turns, ends = [], []
    for _ in range(18):
        turns.append(rotation.active_group)
        ends.append(rotation.ends_turn)
        advance(rotation, 0.1)
    assert turns == [2, 2, 2, 0, 0, 0, 1, 1, 1] * 2
    assert ends == [False, False, True] * 6
    assert rotation.cycle_length == 9


def test_the_rate_of_a_cycle_is_read_at_its_first_update() -> None:
    rotation = Rotation(order=(0, 1), steps_per_group=2)
    applied = [advance(rotation, 1.0 - 0.1 * update) for update in range(9)]
    assert applied == [1.0] * 4 + [1.0 - 0.1 * 4] * 4 + [1.0 - 0.1 * 8]


def test_asking_without_applying_changes_nothing() -> None:
    rotation = Rotation(order=(0, 1), steps_per_group=1)
    assert rotation.to_apply([1.0]) == [1.0]
    assert rotation.to_apply([0.5]) == [0.5]
    assert (rotation.updates, rotation.held_lr) == (0, [])


def test_a_tensor_rate_is_held_by_value() -> None:
    rotation = Rotation(order=(0, 1), steps_per_group=1)
    rate = torch.tensor(1.0)
    rotation.advance(rotation.to_apply([rate]))
    rate.fill_(0.5)
    assert rotation.to_apply([rate]) == [torch.tensor(1.0)]


@pytest.mark.parametrize(
    ("rates", "held"),
    [
        ([[0.0], [0.0], [0.5], [1.0]], [[0.0], [0.0], [0.5], [0.5]]),
        (
            [[0.0, torch.tensor(0.0)], [0.0, 0.0], [0.0, 0.5], [1.0, 1.0]],
            [[0.0, 0.0], [0.0, 0.0], [0.0, 0.5], [0.0, 0.5]],
        ),
        ([[0.0, None], [0.5, None], [0.5, None], [1.0, None]], [[0.0, None]] * 4),
    ],
    ids=["one", "all", "chosen by the optimizer"],
)
def test_rates_are_read_again_while_all_are_0(rates: list[list[Any]], held: list[list[Any]]) -> None:
    rotation = Rotation(order=(0, 1, 2, 3), steps_per_group=1)
    applied = []
    for step, scheduled in enumerate(rates):
        rotation.skip(scheduled) if step == 1 else rotation.advance(rotation.to_apply(scheduled))
        applied.append(rotation.held_lr)
    assert applied == held


def test_it_pickles_in_mid_cycle() -> None:
    rotation = Rotation(order=(1, 0, 2), steps_per_group=2)
    for _ in range(3):
        advance(rotation, 0.1)
    assert pickle.loads(pickle.dumps(rotation)) == rotation


def test_a_skipped_step_takes_its_place_in_turn_and_cycle_and_is_no_update() -> None:
    rotation = Rotation(order=(1, 0), steps_per_group=2)
    turns, held = [], []
    for step in range(8):
        turns.append(rotation.active_group)
        if step in (0, 3, 5):
            rotation.skip([step + 1.0])
        else:
            rotation.advance(rotation.to_apply([step + 1.0]))
        held += rotation.held_lr
    assert turns == [1, 1, 0, 0] * 2
    assert held == [1.0] * 4 + [5.0] * 4
    assert (rotation.updates, rotation.steps, rotation.skipped) == (5, 8, {1: 2, 0: 1})


def test_a_group_is_unreached_when_all_its_steps_of_a_cycle_were_skipped() -> None:
    rotation = Rotation(order=(0, 1), steps_per_group=2)
    seen = []
    for step in range(8):
        if step in (1, 2, 3, 6):
            rotation.skip([0.1])
        else:
            advance(rotation, 0.1)
        seen.append(rotation.unreached)
    assert seen == [(), (), (), (1,), (), (), (), ()]


def test_its_state_continues_it() -> None:
    rotation = Rotation(order=(0, 1, 2), steps_per_group=1)
    for step in range(4):
        rotation.skip([0.1 * step]) if step % 2 else advance(rotation, 0.1 * step)
    again = Rotation(order=(0, 1, 2), steps_per_group=1)
    again.restore(rotation.state())
    assert again == rotation and again.skipped is not rotation.skipped


def layers(count: int) -> list[Layer]:
    return [
        Layer(kind="block", name=f"block.{i}", parameter_names=(f"block.{i}.weight", f"block.{i}.bias"))
        for i in range(count)
    ]


def all_names(count: int) -> frozenset[str]:
    return frozenset(name for layer in layers(count) for name in layer.parameter_names)


@pytest.mark.parametrize(
    ("num_layers", "layers_per_group", "expected"),
    [(34, 1, [1] * 34), (8, 3, [3, 3, 2]), (6, 3, [3, 3]), (5, 5, [5]), (7, 4, [4, 3])],
)
def test_layers_are_cut_from_the_bottom_into_groups(
    num_layers: int, layers_per_group: int, expected: list[int]
) -> None:
    groups = cut_groups(layers(num_layers), layers_per_group, all_names(num_layers))
    assert [len(group.layers) for group in groups] == expected
    assert [group.index for group in groups] == list(range(len(expected)))
    assert [layer.name for group in groups for layer in group.layers] == [f"block.{i}" for i in range(num_layers)]


def test_frozen_parameters_take_no_part_and_frozen_layers_no_turn() -> None:
    groups = cut_groups(layers(4), 1, frozenset({"block.0.weight", "block.2.weight", "block.2.bias"}))
    assert [group.parameter_names for group in groups] == [("block.0.weight",), ("block.2.weight", "block.2.bias")]


def test_more_layers_a_group_than_there_are_and_a_model_that_is_frozen_whole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layers_per_group=5 must be in \[1, 4\]"):
        cut_groups(layers(4), 5, all_names(4))
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        cut_groups(layers(4), 1, frozenset())


def test_orders() -> None:
    assert turn_order(4, "bottom2up", 0) == (0, 1, 2, 3)
    assert turn_order(4, "top2down", 0) == (3, 2, 1, 0)
    shuffled = turn_order(30, "random", 7)
    assert shuffled == turn_order(30, "random", 7) != turn_order(30, "random", 8)
    assert sorted(shuffled) == list(range(30)) != list(shuffled)
