import pytest

from slivertune.core.layers import Layer
from slivertune.hift.groups import cut_groups, turn_order


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
    trainable = frozenset({"block.0.weight", "block.2.weight", "block.2.bias"})
    groups = cut_groups(layers(4), 1, trainable)
    assert [group.parameter_names for group in groups] == [("block.0.weight",), ("block.2.weight", "block.2.bias")]


def test_more_layers_a_group_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers_per_group=5 must be in \[1, 4\]"):
        cut_groups(layers(4), 5, all_names(4))


def test_a_model_that_is_frozen_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        cut_groups(layers(4), 1, frozenset())


def test_orders() -> None:
    assert turn_order(4, "bottom2up", 0) == (0, 1, 2, 3)
    assert turn_order(4, "top2down", 0) == (3, 2, 1, 0)
    shuffled = turn_order(30, "random", 7)
    assert shuffled == turn_order(30, "random", 7) != turn_order(30, "random", 8)
    assert sorted(shuffled) == list(range(30)) != list(shuffled)
