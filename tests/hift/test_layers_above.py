"""Steps of the layers above the active group: no state, one gradient alive, the active group's norm, no loss unsaid.

Their bits beside all other settings are in `test_pairwise.py`.
"""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from slivertune import HiFT, HiFTConfig, Ledger
from slivertune.hift import tiled_steps
from slivertune.hift.chunk import Slice
from tests.helpers.models import (
    LAYERS,
    assert_same_bits,
    assert_same_tree,
    differing,
    small_decoder,
    token_batches,
    twin,
    weights,
)
from tests.helpers.reference import decay_split, grouped_optimizer, train
from tests.hift.cases import hift_over, said

ABOVE: dict[str, Any] = {"inactive": "above", "gradients": "stepped"}


def test_only_the_active_group_and_the_layers_above_it_move() -> None:
    model, hift = hift_over(small_decoder(), "AdamW", **ABOVE)
    for _ in range(LAYERS):
        below = {name for group in hift.groups[: hift.active_group] for name in group.parameter_names}
        before = weights(model)
        train(model, hift, token_batches(1), 1)
        assert set(differing(weights(model), before)) == before.keys() - below


def test_rates_follow_the_schedule_by_param_group() -> None:
    moves = []
    for rates in ((1e-3, 1e-3), (2e-3, 0.0)):
        model = small_decoder()
        base = grouped_optimizer(model, torch.optim.SGD, decay_split(model, decay=0.0), lr=1e-3)
        hift = HiFT.wrap(base, model, config=HiFTConfig.paper(inactive_rate=0.5, **ABOVE))
        for group, rate in zip(hift.param_groups, rates, strict=True):
            group["lr"] = rate
        before = weights(model)
        train(model, hift, token_batches(1), 1)
        moves.append({name: value - before[name] for name, value in weights(model).items()})
    for name in moves[0].keys() - {"model.embed_tokens.weight"}:
        factor = 2.0 if moves[0][name].ndim >= 2 else 0.0
        # The weights are near 1, in fp32: each of both moves is off by half an ulp of that.
        torch.testing.assert_close(moves[1][name], factor * moves[0][name], rtol=0, atol=3 * 2**-24)
    # A new Adafactor moves each vector by the rate, if it has gradients everywhere.
    norm = moves[0]["model.norm.weight"]
    torch.testing.assert_close(norm.abs(), torch.full_like(norm, 0.5e-3), rtol=0, atol=2**-24)


def test_tiles_step_as_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained(small_decoder())
    monkeypatch.setattr(tiled_steps, "TILE_ELEMENTS", 256)
    in_tiles, _ = trained(small_decoder())
    assert differing(weights(in_tiles), weights(whole)), "nothing ran in tiles"
    for name, value in weights(in_tiles).items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=1e-5, atol=1e-6)


def trained(model: Any, updates: int = LAYERS + 2, **settings: Any) -> tuple[Any, HiFT]:
    _, hift = hift_over(model, "SGD", **{"lr": 1e-2, **ABOVE, **settings})
    train(model, hift, token_batches(updates), updates)
    assert hift.updates == updates
    return model, hift


def test_state_is_that_of_the_active_groups_alone() -> None:
    states = []
    for inactive in ("frozen", "above"):
        _, hift = hift_over(small_decoder(), "AdamW", gradients="stepped", inactive=inactive)
        train(hift.turns.hooks.model, hift, token_batches(2), 2)
        state = hift.state_dict()
        states.append({name: sorted(values) for name, values in state["state"].items()})
    assert_same_tree(*states)


def test_one_gradient_is_alive_at_a_time() -> None:
    peaks = []
    for inactive in ("frozen", "above"):
        model, hift = hift_over(small_decoder(), "SGD", gradients="stepped", inactive=inactive)
        with Ledger(model) as ledger:
            train(model, hift, token_batches(1), 1)
            peaks.append(ledger.peak.gradients)
    assert peaks[1] <= max(parameter.nbytes for parameter in model.parameters())
    assert peaks[0] <= peaks[1]


def test_the_norm_is_the_active_groups() -> None:
    norms = []
    for inactive in ("frozen", "above"):
        model, hift = hift_over(small_decoder(), "AdamW", gradients="stepped", inactive=inactive)
        model(**token_batches(1)[0]).loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
        hift.step()
    assert norms[0] == norms[1] > 0


def test_a_second_backward_before_the_step_is_refused() -> None:
    model, _ = hift_over(small_decoder(), "AdamW", **ABOVE)
    model(**token_batches(1)[0]).loss.backward()
    with pytest.raises(RuntimeError, match=r"lm_head.weight got a second gradient before step"):
        model(**token_batches(1)[0]).loss.backward()


def test_a_batch_that_reaches_the_layers_above_alone_counts_and_is_said() -> None:
    model, hift = hift_over(small_decoder(), "AdamW", **ABOVE)
    before = weights(model)
    with said() as messages:
        model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output.detach())
        train(model, hift, token_batches(1), 1)
    assert any("group 0 (model.embed_tokens.weight): only the layers above it step" in each for each in messages)
    assert hift.updates == 1 and hift.active_group == 1 and hift.skipped_turns == {}
    assert set(differing(weights(model), before)) == before.keys() - {"model.embed_tokens.weight"}
    with said() as messages:
        train(model, hift, token_batches(LAYERS), LAYERS - 1, start=1)
    assert any("no batch of a whole cycle reached group 0" in each for each in messages)


def test_a_step_that_failed_leaves_no_state_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"gradients": "stepped", "inactive": "above", "master": "stochastic"}
    whole, other = hift_over(small_decoder(torch.bfloat16), "SGD", **settings)
    train(whole, other, token_batches(1), 1)
    model, hift = hift_over(small_decoder(torch.bfloat16), "SGD", **settings)
    kept, state = weights(model), hift.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(Slice, "write_weight", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(model, hift, token_batches(1), 1)
    model.load_state_dict(kept)
    hift.load_state_dict(state)
    train(model, hift, token_batches(1), 1)
    assert_same_bits(whole, model)


def stopped(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("turn", [0, 1])
def test_gradients_of_an_update_that_is_given_up_are_dropped(turn: int) -> None:
    model, hift = trained(small_decoder(), updates=turn)
    states = [weights(model), hift.state_dict()]
    model, hift = hift_over(small_decoder(), "SGD", lr=1e-2, **ABOVE)
    with hift.accumulating():
        model(**token_batches(1)[0]).loss.backward()
    model.load_state_dict(states[0])
    hift.load_state_dict(states[1])
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []


@pytest.mark.parametrize("master", ["fp32", "none"])
def test_bf16_weights_need_stochastic_rounding(master: str) -> None:
    model = small_decoder(torch.bfloat16)
    with pytest.raises(ValueError, match=rf"bf16 weights .*master='{master}'.*Set master='stochastic'"):
        hift_over(model, "AdamW", master=master, **ABOVE)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), token_batches(1), 1)  # nothing is left attached


def test_an_optimizer_that_chooses_its_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"share of the learning rate.*lr=None"):
        hift_over(small_decoder(), "transformers Adafactor", **ABOVE)


def test_one_group_of_all_layers_has_none_above() -> None:
    frozen, _ = trained(small_decoder(), layers_per_group=LAYERS, inactive="frozen")
    above, _ = trained(small_decoder(), layers_per_group=LAYERS)
    assert_same_bits(frozen, above)


def test_detach_and_reattach_go_on() -> None:
    whole, _ = trained(small_decoder(), updates=4)
    model, hift = trained(small_decoder(), updates=2)
    hift.detach()
    assert all(parameter.requires_grad for parameter in model.parameters())
    hift.reattach()
    train(model, hift, token_batches(4), 2, start=2)
    assert_same_bits(whole, model)


def test_it_is_adafactors_first_step() -> None:
    model, hift = hift_over(small_decoder(), "SGD", lr=1e-2, **ABOVE)
    other = twin(model)
    other(**token_batches(1)[0]).loss.backward()
    rest = [parameter for name, parameter in other.named_parameters() if "embed_tokens" not in name]
    rate = 1e-2 * HiFTConfig().inactive_rate
    Adafactor(rest, lr=rate, scale_parameter=False, relative_step=False).step()
    torch.optim.SGD([other.model.embed_tokens.weight], lr=1e-2).step()
    train(model, hift, token_batches(1), 1)
    assert_same_bits(other, model)
