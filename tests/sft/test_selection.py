import itertools

import pytest
import torch

from slivertune.sft.selection import contains, random_indices, spread_weights


def test_contains_finds_members_alone() -> None:
    members = torch.tensor([2, 5, 9], dtype=torch.int32)
    values = torch.tensor([0, 2, 3, 9, 11], dtype=torch.int32)
    assert contains(members, values).tolist() == [False, True, False, True, False]
    assert contains(members[:0], values).tolist() == [False] * 5


@pytest.mark.parametrize("count", [1, 30, 499, 500, 900, 1000])
def test_random_indices_are_sorted_unique_and_the_same_again(count: int) -> None:
    drawn = random_indices("a.weight", 1000, count, seed=3)
    assert drawn.dtype == torch.int32
    assert drawn.tolist() == sorted(set(drawn.tolist())) and len(drawn) == count
    assert drawn[0] >= 0 and drawn[-1] < 1000
    assert torch.equal(drawn, random_indices("a.weight", 1000, count, seed=3))
    if count < 1000:
        assert not torch.equal(drawn, random_indices("b.weight", 1000, count, seed=3))
        assert not torch.equal(drawn, random_indices("a.weight", 1000, count, seed=4))


def test_random_indices_are_uniform() -> None:
    hits = torch.zeros(200)
    for seed in range(400):
        hits[random_indices("x", 200, 20, seed).long()] += 1
    # Binomial(400, 0.1): mean 40, standard deviation 6; five of them.
    assert hits.min() > 10 and hits.max() < 70


def test_spread_weights_adds_up_and_keeps_the_share() -> None:
    for sizes, total in itertools.product([[7], [100, 300, 600], [3, 1000, 5, 40]], [4, 7]):
        shares = spread_weights(sizes, total)
        assert sum(shares) == total
        assert all(1 <= share <= size for share, size in zip(shares, sizes, strict=True))
    assert spread_weights([100, 300, 600], 100) == [10, 30, 60]
    assert spread_weights([5, 5], 10) == [5, 5]


@pytest.mark.parametrize("total", [1, 1001])
def test_spread_weights_says_what_does_not_fit(total: int) -> None:
    with pytest.raises(ValueError, match=rf"{total} weights do not fit: the 2 target tensors .* hold 1000"):
        spread_weights([400, 600], total)
