"""The optimizer against the plain reference, on gradients that are prescribed."""

from typing import Any

import numpy as np
import pytest
import torch

from slivertune import SFT
from tests.helpers.models import bits
from tests.helpers.pairwise import rotated
from tests.helpers.tolerance import assert_sums_close, sum_limit, unit_roundoff
from tests.sft.reference import NAMES, SHAPES, NaiveSFT, Prescribed, prescribed_gradients, reselection_times
from tests.sft.runs import sft_over, train

TOTAL = 40

CASES: dict[str, dict[str, Any]] = {
    "AG": {"selection": "accumulated_gradient", "lr": 1e-2},
    "AG, weight decay": {"selection": "accumulated_gradient", "lr": 1e-2, "weight_decay": 3.0},
    "AG, other betas": {"selection": "accumulated_gradient", "lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-3},
    "AG, clipped": {"selection": "accumulated_gradient", "lr": 1e-2, "eps": 0.1, "max_norm": 1.0},
    "MA": {"selection": "momentum", "lr": 3e-2},
    "MA, momentum and decay": {"selection": "momentum", "lr": 3e-2, "momentum": 0.9, "weight_decay": 1.0},
    "MA, clipped": {"selection": "momentum", "lr": 3e-2, "eps": 0.1, "max_norm": 1.0},
}


def build(
    model: Prescribed, case: dict[str, Any], *, interval: int = 8, gamma: int = 3, alpha: float = 0.5
) -> tuple[SFT, NaiveSFT]:
    """The optimizer over a model, and the reference that begins with the same positions."""
    before = {name: model.get_parameter(name).detach().clone() for name in NAMES}
    optimizer = sft_over(
        model,
        density=0.15,
        reselection_interval=interval,
        estimation_steps=gamma,
        replacement_rate=alpha,
        targets=NAMES,
        max_grad_norm=case.get("max_norm"),
        **{key: value for key, value in case.items() if key != "max_norm"},
    )
    active = {name: delta.indices.long() for name, delta in optimizer.deltas().items()}
    options = {
        "betas": (0.9, 0.999),
        "eps": 1e-30 if case["selection"] == "momentum" else 1e-8,
        "weight_decay": 0.0,
        "momentum": 0.0,
        **case,
    }
    return optimizer, NaiveSFT(before, active, interval=interval, gamma=gamma, alpha=alpha, total=TOTAL, **options)


def train_both(model: Prescribed, optimizer: SFT, naive: NaiveSFT, count: int, *, check: bool = False) -> None:
    """So many updates of the optimizer and of the reference; compared after each, if asked for."""
    for gradients in prescribed_gradients(count):
        train(model, optimizer, [gradients])
        naive.update([gradients])
        if check:
            assert_equal_to_reference(model, optimizer, naive)


def assert_equal_to_reference(model: Prescribed, optimizer: SFT, naive: NaiveSFT) -> None:
    """Positions and ages exactly; the state to what ten roundings of each fp32 update add up to, against fp64."""
    state = optimizer.state_dict()["state"]
    for name, delta in optimizer.deltas().items():
        expected = naive.state[name]
        active = np.flatnonzero(expected["mask"])
        assert delta.indices.tolist() == active.tolist()
        pairs = [("delta", "delta")]
        if naive.options["selection"] == "momentum":
            pairs += [("momentum_buffer", "m")] if naive.options["momentum"] else []
            for key in ("rows", "columns"):
                accumulated = torch.from_numpy(expected[key])
                assert_sums_close(state[name][key], accumulated, 10 * naive.t, size=accumulated)
        else:
            assert state[name]["age"].tolist() == expected["age"][active].tolist()
            pairs += [("exp_avg", "m"), ("exp_avg_sq", "v")]
        for ours, theirs in pairs:
            want = torch.from_numpy(expected[theirs][active])
            size = naive.t * naive.options["lr"] if ours == "delta" else None
            assert_sums_close(state[name][ours], want, 10 * naive.t, size=size)
        mask = torch.from_numpy(expected["mask"]).view(naive.base[name].shape)
        weight = model.get_parameter(name).detach()
        assert torch.equal(bits(weight[~mask]), bits(naive.base[name][~mask]))
        # One unit in the last place of the weights, where the two sums round to different sides.
        wanted = naive.weights()[name].double()
        limit = sum_limit(10 * naive.t, torch.float32, naive.t * naive.options["lr"])
        assert bool(((weight.double() - wanted).abs() <= limit + 2 * unit_roundoff(weight.dtype) * wanted.abs()).all())


@rotated(case=CASES, dtype=[torch.float32, torch.bfloat16], micro_batches=[1, 3])
def test_every_update_equals_the_plain_reference(case: str, dtype: torch.dtype, micro_batches: int) -> None:
    model = Prescribed(SHAPES, dtype)
    optimizer, naive = build(model, CASES[case])
    batches = prescribed_gradients(30 * micro_batches, dtype)
    chosen = [optimizer.deltas()["first.weight"].indices.tolist()]
    for update in range(30):
        micros = batches[update * micro_batches : (update + 1) * micro_batches]
        for gradients in micros:
            model(gradients).backward()
        optimizer.step()
        norm = naive.update(micros)
        if update + 1 == reselection_times(CASES[case]["selection"], 30, 8, 3)[0]:
            assert not set(chosen[0]) & set(optimizer.deltas()["first.weight"].indices.tolist())
        assert optimizer.updates == update + 1
        assert optimizer.grad_norm is not None
        # The sum whose root is the norm, with those of the micro-batches.
        limit = sum_limit(micro_batches + optimizer.num_weights, torch.float32)
        assert float(optimizer.grad_norm) == pytest.approx(norm, rel=limit)
        assert_equal_to_reference(model, optimizer, naive)
        chosen.append(optimizer.deltas()["first.weight"].indices.tolist())
    changed = [t for t in range(1, 31) if chosen[t] != chosen[t - 1]]
    assert changed == reselection_times(CASES[case]["selection"], 30, 8, 3)
    assert torch.equal(model.bystander, torch.ones(3, dtype=dtype))


@pytest.mark.parametrize(("interval", "gamma"), [(4, 3), (5, 3), (6, 5), (2, 1)])
def test_phases_that_overlap_take_gamma_updates_each(interval: int, gamma: int) -> None:
    model = Prescribed(SHAPES)
    optimizer, naive = build(model, CASES["AG"], interval=interval, gamma=gamma)
    train_both(model, optimizer, naive, 20, check=True)


@pytest.mark.parametrize("case", ["AG", "MA"])
@pytest.mark.parametrize("density", [0.6, 0.9])
def test_where_little_is_frozen_no_more_is_replaced_than_there_is(case: str, density: float) -> None:
    model = Prescribed(SHAPES)
    options = CASES[case]
    optimizer = sft_over(
        model,
        density=density,
        selection=options["selection"],
        reselection_interval=8,
        estimation_steps=3,
        targets=NAMES,
        lr=options["lr"],
        total_steps=TOTAL,
    )
    before = {name: set(delta.indices.tolist()) for name, delta in optimizer.deltas().items()}
    train(model, optimizer, prescribed_gradients(8)[: 3 if case == "AG" else 8])
    for name, delta in optimizer.deltas().items():
        size = model.get_parameter(name).numel()
        assert delta.num_weights == len(before[name])
        # All that was frozen is active now.
        assert set(range(size)) - before[name] <= set(delta.indices.tolist())


@pytest.mark.parametrize("case", ["AG", "MA"])
def test_without_reselection_the_first_positions_stay(case: str) -> None:
    model = Prescribed(SHAPES)
    optimizer, naive = build(model, CASES[case], interval=0)
    first = optimizer.deltas()
    for gradients in prescribed_gradients(20):
        train(model, optimizer, [gradients])
        naive.update([gradients])
        assert not optimizer.is_estimating
    assert_equal_to_reference(model, optimizer, naive)
    for name, delta in optimizer.deltas().items():
        assert torch.equal(delta.indices, first[name].indices)


@pytest.mark.parametrize("case", ["AG", "MA"])
def test_after_every_step_indices_are_sorted_unique_and_as_many_as_before(case: str) -> None:
    model = Prescribed(SHAPES, torch.bfloat16)
    optimizer, _ = build(model, CASES[case])
    counts = {name: round(0.15 * model.get_parameter(name).numel()) for name in NAMES}
    for gradients in prescribed_gradients(TOTAL, torch.bfloat16):
        train(model, optimizer, [gradients])
        for name, delta in optimizer.deltas().items():
            assert delta.num_weights == counts[name]
            assert delta.indices.tolist() == sorted(set(delta.indices.tolist()))


def test_a_dropped_weight_gets_its_pretrained_bits_back() -> None:
    model = Prescribed(SHAPES, torch.bfloat16)
    before = {name: model.get_parameter(name).detach().clone() for name in NAMES}
    optimizer, _ = build(model, CASES["AG"])
    moved = dict.fromkeys(NAMES, 0)
    for gradients in prescribed_gradients(TOTAL, torch.bfloat16):
        was_active = {name: set(delta.indices.tolist()) for name, delta in optimizer.deltas().items()}
        changed = {name: bits(model.get_parameter(name)).clone() for name in NAMES}
        train(model, optimizer, [gradients])
        for name, delta in optimizer.deltas().items():
            dropped = torch.tensor(sorted(was_active[name] - set(delta.indices.tolist())), dtype=torch.long)
            now, then = model.get_parameter(name).detach().flatten()[dropped], before[name].flatten()[dropped]
            assert torch.equal(bits(now), bits(then))
            moved[name] += int((changed[name].view(torch.bfloat16)[dropped] != then).sum())
    assert all(count > 0 for count in moved.values()), "no dropped weight had ever moved: nothing was restored"


def test_a_tensor_without_a_gradient_is_left_alone_and_the_others_go_on() -> None:
    model = Prescribed(SHAPES)
    optimizer, naive = build(model, CASES["AG"])
    idle = model.get_parameter("second.weight").detach().clone()
    for gradients in prescribed_gradients(19):
        model({name: gradient for name, gradient in gradients.items() if name != "second.weight"}).backward()
        optimizer.step()
        naive.update([gradients])
    assert torch.equal(model.get_parameter("second.weight"), idle)
    assert optimizer.state_dict()["state"]["second.weight"]["age"].eq(0).all()
    delta = optimizer.deltas()["first.weight"]
    assert delta.indices.tolist() == np.flatnonzero(naive.state["first.weight"]["mask"]).tolist()


@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
def test_a_weight_with_a_delta_of_zero_keeps_its_bits(selection: str) -> None:
    """Added to zero, -0.0 would become 0.0."""
    model = Prescribed(SHAPES)
    with torch.no_grad():
        for name in ("second", "third"):
            model.get_parameter(f"{name}.weight").fill_(-0.0)
    optimizer = sft_over(model, selection=selection, density=0.5, targets=NAMES)
    gradients = prescribed_gradients(13)
    for batch in gradients:
        batch.pop("second.weight")
    train(model, optimizer, gradients)
    assert model.get_parameter("second.weight").signbit().all()
    idle = torch.ones(SHAPES["third"], dtype=torch.bool)
    idle[optimizer.positions()["third.weight"].long()] = False
    assert model.get_parameter("third.weight")[idle].signbit().all() and idle.any()


def test_a_step_without_gradients_counts_for_nothing() -> None:
    model = Prescribed(SHAPES)
    optimizer, _ = build(model, CASES["AG"])
    optimizer.step()
    assert optimizer.updates == 0
    model(prescribed_gradients(1)[0]).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.updates == 0


@pytest.mark.parametrize("drop", ["optimizer.zero_grad", "model.zero_grad"])
@pytest.mark.parametrize("case", ["AG", "MA"])
def test_gradients_that_the_loop_throws_away_leave_no_trace(case: str, drop: str) -> None:
    model, other = Prescribed(SHAPES), Prescribed(SHAPES)
    optimizer, _ = build(model, CASES[case])
    undisturbed, _ = build(other, CASES[case])
    noise = prescribed_gradients(2, seed=9)
    for gradients in prescribed_gradients(20):
        for unwanted in noise:
            model({name: 100 * value for name, value in unwanted.items()}).backward()
        optimizer.zero_grad() if drop == "optimizer.zero_grad" else model.zero_grad()
        model(gradients).backward()
        train(other, optimizer, [gradients])
        undisturbed.step()
        for name in NAMES:
            assert torch.equal(bits(model.get_parameter(name)), bits(other.get_parameter(name)))


def test_dense_gradients_are_gone_as_soon_as_they_are_complete() -> None:
    model = Prescribed(SHAPES)
    optimizer, _ = build(model, CASES["AG"])
    model(prescribed_gradients(1)[0]).backward()
    assert all(model.get_parameter(name).grad is None for name in NAMES)
    assert model.bystander.grad is None
    gathered = [p.grad for p in optimizer.param_groups[0]["params"] if p.ndim == 1]
    assert [g.numel() for g in gathered] == [delta.num_weights for delta in optimizer.deltas().values()]


def test_the_closure_is_called_once_and_its_loss_returned() -> None:
    model = Prescribed(SHAPES)
    optimizer, _ = build(model, CASES["AG"])
    calls = []

    def closure() -> float:
        loss = model(prescribed_gradients(1)[0])
        loss.backward()
        calls.append(loss.item())
        return float(calls[-1])

    assert optimizer.step(closure) == calls[0]
    assert len(calls) == optimizer.updates == 1


@pytest.mark.parametrize("merge", [True, False])
def test_detach_leaves_a_model_as_it_was_before(merge: bool) -> None:
    model = Prescribed(SHAPES, torch.bfloat16)
    model.bystander.requires_grad_(False)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer, _ = build(model, CASES["AG"])
    train(model, optimizer, prescribed_gradients(12, torch.bfloat16))
    trained = {name: value.detach().clone() for name, value in model.named_parameters() if name in before}
    optimizer.detach(merge=merge)
    wanted = trained if merge else before
    assert list(before) == [name for name, _ in model.named_parameters()]
    for name, value in model.named_parameters():
        assert torch.equal(bits(value), bits(wanted[name]))
        assert value.requires_grad == (name != "bystander")
        assert not value._post_accumulate_grad_hooks
    model(prescribed_gradients(1)[0]).backward()
    assert all(model.get_parameter(name).grad is not None for name in NAMES)
    assert any(not torch.equal(bits(trained[name]), bits(before[name])) for name in NAMES)
