import gc
import weakref

import pytest
import torch
from torch import nn

from slivertune.core.parameters import check_free, owner_of, release, take


class Owner:
    """An optimizer, for all that the registry knows."""


def test_a_parameter_has_one_owner_until_that_gives_it_back() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    owner = Owner()
    take(first.parameters(), owner)
    assert owner_of(first.weight) is owner and owner_of(second.weight) is None
    check_free(second.named_parameters(), "SFT")
    with pytest.raises(ValueError, match=r"^inner\.weight is trained by another Owner.*SFT.*detach\(\)"):
        check_free(nn.ModuleDict({"inner": first}).named_parameters(), "SFT")
    release(first.parameters(), Owner())
    assert owner_of(first.weight) is owner, "what another one holds is not its to give back"
    release(first.parameters(), owner)
    check_free(first.named_parameters(), "SFT")


def test_an_owner_that_is_gone_owns_nothing_even_one_in_a_circle() -> None:
    model, owner = nn.Linear(2, 2), Owner()
    owner.itself = owner  # type: ignore[attr-defined]
    take(model.parameters(), owner)
    gc.disable()
    try:
        del owner
        check_free(model.named_parameters(), "HiFT")
    finally:
        gc.enable()


def test_the_registry_keeps_nothing_alive() -> None:
    model, owner = nn.Linear(2, 2), Owner()
    take(model.parameters(), owner)
    kept = weakref.ref(model.weight), weakref.ref(owner)
    del model, owner
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_equal_parameters_are_not_the_same() -> None:
    left, right = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    owner = Owner()
    take([left], owner)
    assert owner_of(right) is None
