"""Bytes of state for each active weight, counted by the ledger from outside."""

import pytest
import torch

from slivertune import SFT, Ledger, SFTConfig
from tests.helpers.models import small_decoder, token_batches
from tests.sft.runs import sft_over, train

GAMMA, INTERVAL = 3, 7


@pytest.mark.slow
@pytest.mark.parametrize("form", ["optimizer", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
def test_state_bytes_of_an_active_weight(selection: str, packed: bool, dtype: torch.dtype, form: str) -> None:
    model = small_decoder(dtype)
    config = SFTConfig(
        density=0.05,
        selection=selection,
        reselection_interval=INTERVAL,
        estimation_steps=GAMMA,
        replacement_rate=0.5,
        form=form,
        packed=packed,
    )
    batches = token_batches(2)
    with Ledger(model) as ledger:
        optimizer = SFT(model, config=config, lr=1e-2, total_steps=40)
        count = optimizer.num_weights
        # SM3's rows and columns are O(h + w), and listed apart.
        covers = 0
        if selection == "momentum":
            covers = 4 * sum(sum(delta.shape) for delta in optimizer.deltas().values())
        fp32 = 2 if dtype == torch.float32 else 0
        usual = {"accumulated_gradient": 12 if packed else 20, "momentum": 8 if packed else 12}[selection] + fp32
        in_phase_bytes = (24 if packed else 36) + fp32
        for update in range(1, 30):
            in_phase = optimizer.is_estimating
            highest = 0.0
            ledger.reset_peak()
            for batch in batches:
                (model(**batch).loss / 2).backward()
                census = ledger.current()
                highest = max(highest, census.state - covers)
                # One fp32 value a weight, and the witness.
                assert census.gradients == 4 * count + 4
            optimizer.step()
            census = ledger.current()
            highest = max(highest, census.state - covers)
            assert census.gradients == 0
            assert 4 * count <= highest <= (in_phase_bytes if in_phase else usual) * count, update
        assert ledger.highest.gradients < 4 * count + 4 + 3 * max(
            parameter.nbytes for parameter in model.parameters()
        ), "more than one tensor's dense gradient lived at a time"


def test_an_estimation_phase_costs_what_it_says_and_ends() -> None:
    model = small_decoder(torch.bfloat16)
    config = SFTConfig(density=0.05, reselection_interval=INTERVAL, estimation_steps=GAMMA, replacement_rate=0.5)
    with Ledger(model) as ledger:
        optimizer = SFT(model, config=config, lr=1e-2, total_steps=40)
        seen = []
        for batch in token_batches(16):
            train(model, optimizer, [batch])
            seen.append(ledger.current().state / optimizer.num_weights)
    # Updates 3, 7 and 14 end a phase; between its updates the candidates take 16 bytes.
    assert seen == [20 + 16 * (t in (1, 2, 5, 6, 12, 13)) for t in range(1, 17)]


@pytest.mark.parametrize(("interval", "share"), [(0, 0.14), (20, 0.6)])
def test_the_layer_form_never_holds_a_dense_gradient(interval: int, share: float) -> None:
    """Rows beyond one chunk: what is alive during backward stays below the dense gradient."""
    rows, columns = 8192, 4096
    layer = torch.nn.Linear(columns, rows, bias=False)
    optimizer = sft_over(
        layer, density=0.01, form="layer", targets=["weight"], reselection_interval=interval, estimation_steps=5
    )
    inputs = torch.randn(2, columns)
    loss = layer(inputs).sum()
    with Ledger(layer) as ledger:
        ledger.track([inputs])
        ledger.reset_peak()
        loss.backward()
    dense = rows * columns * 4
    # One chunk is an eighth. The search takes a byte for each of its elements, 16 for each of a piece, and some vectors
    # along the pool and what may enter it.
    assert ledger.peak.gradients + ledger.peak.residual < share * dense
    optimizer.detach()
