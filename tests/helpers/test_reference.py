"""The reference is itself checked: with one group it is the plain optimizer."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.helpers.models import (
    LAYERS,
    assert_same_bits,
    bits,
    differing,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
    token_batches,
    twin,
    weights,
)
from tests.helpers.reference import NaiveHiFT, decay_split, grouped_optimizer, naive_groups, train
from tests.hift.cases import BIG_VOCAB, OPTIMIZERS, WITH_LR, warm_cosine


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reference_with_one_group_is_the_plain_optimizer(name: str) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    model = tiny_llama(vocab=BIG_VOCAB)
    other = twin(model)
    batches = token_batches(6, vocab=BIG_VOCAB)
    split = decay_split(model)
    options = {key: value for key, value in options.items() if key != "weight_decay"}
    plain = grouped_optimizer(model, optimizer_class, split, **options)
    reference = NaiveHiFT(other, optimizer_class, groups=naive_groups(other, LAYERS), split=split, **options)
    for trained, optimizer, scheduled in ((model, plain, plain), (other, reference, reference.carrier)):
        train(
            trained,
            optimizer,
            batches,
            6,
            max_norm=1e-2,
            scheduler=LambdaLR(scheduled, lambda step: warm_cosine(step, 6)) if name in WITH_LR else None,
        )
    assert_same_bits(model, other)


def test_reference_with_several_groups_changes_the_active_group_alone() -> None:
    model = tiny_llama()
    groups = naive_groups(model, 2)
    reference = NaiveHiFT(model, torch.optim.SGD, groups=groups, order=[2, 0, 1], steps_per_group=2, lr=0.5)
    for expected in [2, 2, 0, 0, 1, 1, 2]:
        before = weights(model)
        train(model, reference, token_batches(1), 1)
        assert differing(before, weights(model)) == sorted(groups[expected])


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_bert])
def test_naive_groups_hold_every_parameter_once(build) -> None:  # type: ignore[no-untyped-def]
    model = build()
    for layers_per_group, sizes in [(1, 5), (2, 3), (3, 2), (4, 2), (5, 1)]:
        groups = naive_groups(model, layers_per_group)
        assert len(groups) == sizes
        assert sorted(name for group in groups for name in group) == sorted(n for n, _ in model.named_parameters())


def test_bits_tell_signed_zeros_apart() -> None:
    assert not torch.equal(bits(torch.tensor(0.0)), bits(torch.tensor(-0.0)))
    assert torch.equal(bits(torch.tensor([float("nan")])), bits(torch.tensor([float("nan")])))
