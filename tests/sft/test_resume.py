import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from slivertune import SFT
from tests.helpers.models import assert_same_bits, assert_same_tree, small_decoder, token_batches, weights
from tests.helpers.ranks import quick
from tests.sft.reference import NAMES, SHAPES, Prescribed, prescribed_gradients
from tests.sft.runs import over, sft_over, train

TOTAL = 14
SELECTIONS = {
    "AG": {"selection": "accumulated_gradient"},
    "AG, redistributed": {"selection": "accumulated_gradient", "redistribute": True},
    "AG, packed": {"selection": "accumulated_gradient", "packed": True},
    "MA": {"selection": "momentum"},
    "MA, packed": {"selection": "momentum", "packed": True},
}


def build(model: nn.Module, selection: str) -> tuple[SFT, LambdaLR]:
    momentum = 0.5 if selection.startswith("MA") else 0.0
    options = {"momentum": momentum, "weight_decay": 0.1, "replacement_rate": 0.5, **SELECTIONS[selection]}
    optimizer = sft_over(model, total_steps=TOTAL, **options)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def run(model: nn.Module, optimizer: SFT, schedule: LambdaLR, first: int, last: int) -> None:
    batches = token_batches(2 * TOTAL)
    for update in range(first, last):
        train(model, optimizer, batches[2 * update : 2 * update + 2], micro=2)
        schedule.step()


def through_a_file(state: Any) -> Any:
    """Save and load as a checkpoint is: `weights_only` admits plain containers and tensors alone."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


FEW = (3, 10, 12)
"""Updates inside the first phase, and inside and right after a later one."""


@pytest.mark.parametrize(
    ("dtype", "updates"),
    quick(itertools.product([torch.float32, torch.bfloat16], [FEW, range(TOTAL)]), [(torch.bfloat16, FEW)]),
    ids=str,
)
@pytest.mark.parametrize("selection", quick(SELECTIONS, ["AG, redistributed", "AG, packed", "MA, packed"]))
def test_resume_is_exact_at_every_update(selection: str, dtype: torch.dtype, updates: Sequence[int]) -> None:
    model = small_decoder(dtype)
    optimizer, schedule = build(model, selection)
    saved = {}
    for update in range(TOTAL):
        if update in updates:
            saved[update] = through_a_file([optimizer.state_dict(), schedule.state_dict(), model.state_dict()])
        run(model, optimizer, schedule, update, update + 1)
    states = [optimizer_state["state"] for optimizer_state, *_ in saved.values()]
    open_phases = [bool(state) and any("estimates" in w for w in state.values()) for state in states]
    assert any(open_phases) == selection.startswith("AG")
    for update in updates:
        other = small_decoder(dtype)
        resumed, its_schedule = build(other, selection)
        # Into the pretrained model, or into the checkpoint's: both must do.
        if update % 2:
            other.load_state_dict(saved[update][2])
        resumed.load_state_dict(saved[update][0])
        its_schedule.load_state_dict(saved[update][1])
        assert_same_tree(resumed.state_dict(), saved[update][0])
        run(other, resumed, its_schedule, update, TOTAL)
        assert_same_tree(resumed.state_dict(), optimizer.state_dict())
        resumed.detach(merge=True)
        for name, value in weights(other).items():
            assert torch.equal(value, model.get_parameter(name)), f"{name} after resuming at {update}"


@pytest.mark.parametrize(("redistribute", "density", "rate"), [(False, 0.3, 0.5), (True, 0.3, 0.5), (True, 0.02, 0.2)])
def test_a_phase_whose_first_gradient_comes_after_another_reselection_resumes_exactly(
    redistribute: bool, density: float, rate: float
) -> None:
    """Phases of updates 1 to 4 and 3 to 6: the third tensor may double after 4, and has no gradient in 3 and 4.

    With few weights others shrink after 4 so far that nothing is left to replace after 6.
    """
    gradients = prescribed_gradients(TOTAL)
    for batch in gradients[:2]:
        batch["third.weight"] *= 100
    for batch in gradients[2:4]:
        batch.pop("third.weight")
    options: dict[str, Any] = {"density": density, "replacement_rate": rate, "redistribute": redistribute}
    options["targets"] = NAMES
    model, optimizer = over(Prescribed(SHAPES), **options)
    total = optimizer.num_weights
    saved = []
    for batch in gradients:
        train(model, optimizer, [batch])
        saved.append(through_a_file([optimizer.state_dict(), model.state_dict()]))
        assert optimizer.num_weights == total
    for at, (state, values) in enumerate(saved):
        other, resumed = over(Prescribed(SHAPES), **options)
        other.load_state_dict(values)
        resumed.load_state_dict(state)
        assert_same_tree(resumed.state_dict(), state)
        train(other, resumed, gradients[at + 1 :])
        assert_same_tree(resumed.state_dict(), optimizer.state_dict())


def test_a_new_optimizer_over_the_checkpoints_weights_resumes_too() -> None:
    """The order of the HF Trainer: the model's weights are loaded before the optimizer is built."""
    model = small_decoder(torch.bfloat16)
    optimizer, schedule = build(model, "AG")
    run(model, optimizer, schedule, 0, 8)
    state, model_state = through_a_file([optimizer.state_dict(), model.state_dict()])
    other = small_decoder(torch.bfloat16)
    other.load_state_dict(model_state)
    resumed, its_schedule = build(other, "AG")
    resumed.load_state_dict(state)
    its_schedule.load_state_dict(schedule.state_dict())
    run(model, optimizer, schedule, 8, TOTAL)
    run(other, resumed, its_schedule, 8, TOTAL)
    assert_same_bits(model, other)
    optimizer.detach(merge=False)
    resumed.detach(merge=False)
    assert_same_bits(model, other)
    assert_same_bits(model, small_decoder(torch.bfloat16))


def test_loading_over_a_run_in_progress_leaves_nothing_of_it() -> None:
    model = small_decoder(torch.bfloat16)
    optimizer, schedule = build(model, "AG")
    start = through_a_file(optimizer.state_dict())
    run(model, optimizer, schedule, 0, 11)
    optimizer.load_state_dict(start)
    assert_same_tree(optimizer.state_dict(), start)
    fresh = small_decoder(torch.bfloat16)
    build(fresh, "AG")
    assert_same_bits(model, fresh)


def test_the_state_does_not_share_memory_with_what_was_loaded() -> None:
    model = Prescribed(SHAPES)
    optimizer = sft_over(model, density=0.2, targets=NAMES, reselection_interval=6, estimation_steps=4, total_steps=20)
    batches = prescribed_gradients(8)
    train(model, optimizer, batches[:3])
    state = through_a_file(optimizer.state_dict())
    copy = through_a_file(state)
    optimizer.load_state_dict(state)
    train(model, optimizer, batches[3:])
    assert_same_tree(state, copy)


def test_tied_weights_are_trained_and_resumed_as_one(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, SFT]:
        model = small_decoder(torch.bfloat16, tied=True)
        options = {"targets": ["embed_tokens"], "embeddings": True, "estimation_steps": 2, "total_steps": TOTAL}
        return over(model, density=0.2, **options)

    model, optimizer = make()
    reference = small_decoder(torch.bfloat16, tied=True)
    assert list(optimizer.deltas()) == ["model.embed_tokens.weight"]
    batches = token_batches(TOTAL)
    for update, batch in enumerate(batches):
        model(**batch).loss.backward()
        if update == 0:
            # Both uses, embedding and head, have sent their gradient: the sum, gathered.
            reference(**batch).loss.backward()
            whole = reference.get_parameter("model.embed_tokens.weight").grad.flatten().float()
            delta = optimizer.deltas()["model.embed_tokens.weight"]
            assert torch.equal(optimizer.param_groups[0]["params"][0].grad, whole[delta.indices.long()])
        optimizer.step()
        if update == 6:
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    other, resumed = make()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(other, resumed, batches[7:])
    assert_same_bits(model, other)
