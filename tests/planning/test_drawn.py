"""Plans of drawn configurations against real runs of them on the CPU, in one process and on two ranks.

Both count the CPU's own kernels, so that what they may differ by is small: temporaries inside of an operator.
"""

from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedConfig

from slivertune.parallel.ddp import gradient_sync
from slivertune.planning.make import make_plan
from tests.helpers.plan_requests import paper_request
from tests.helpers.ranks import run_ranks
from tests.planning.drawn import FAMILIES, Drawn, draw_all
from tests.planning.layout_runs import BUCKET_BYTES, all_peaks_on_rank
from tests.planning.real import run_for_real

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks"),
    # PEFT 0.21 asks by the name that transformers 5.23 retires.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TOLERANCE = 0.03
"""A plan's promise; most of these are equal to the byte."""
SEED = 20261123
ALONE, ON_RANKS = draw_all(SEED, num_alone=28, num_on_ranks=8)


@pytest.mark.parametrize("drawn", ALONE, ids=str)
def test_a_drawn_run_is_as_planned(drawn: Drawn) -> None:
    plan = make_plan(drawn.request, drawn.config)
    real = run_for_real(drawn.request, drawn.config, num_steps=drawn.num_steps).peak
    assert plan.peak_bytes == pytest.approx(real.device, rel=TOLERANCE), (plan.peak, real)


@pytest.mark.parametrize("drawn", ON_RANKS, ids=str)
def test_a_drawn_run_on_two_ranks_is_as_planned(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sync, "BUCKET_BYTES", BUCKET_BYTES)
    plan = make_plan(drawn.request, drawn.config)
    for (peaks,) in run_ranks(all_peaks_on_rank, 2, [drawn.request], drawn.config):
        assert plan.peak_bytes == pytest.approx(max(peaks), rel=TOLERANCE), (plan.peak, peaks)


SHARED_KEYS = FAMILIES["llama, shared keys"]
LARGER: dict[str, Any] = {"batch_size": 4, "seq_length": 128, "kernels": "cpu"}


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (
            FAMILIES["mistral, window"],
            {"method": "lora", "lora_rank": 64, "gradient_checkpointing": True, "token_ratio": 0.5},
        ),
        (FAMILIES["gpt_bigcode"], {"method": "lora", "precision": "bf16"}),
        (SHARED_KEYS, {"method": "dense"}),
        (SHARED_KEYS, {"method": "sft", "selection": "momentum", "density": 0.05, "reselection_interval": 2}),
    ],
    ids=["window and half of the tokens", "norms under autocast", "shared keys", "shared keys, SFT by momentum"],
)
def test_where_kernels_of_the_cpu_keep_less_a_run_there_is_planned_with_them(
    config: PreTrainedConfig, settings: dict[str, Any]
) -> None:
    request = paper_request(**settings, **LARGER)
    plan, of_a_gpu = make_plan(request, config), make_plan(replace(request, kernels="gpu"), config)
    # Six updates: what each leaves to the garbage collector would add up.
    real = run_for_real(request, config, num_steps=6).peak
    assert plan.peak_bytes == pytest.approx(real.device, rel=0.01), (plan.peak, real)
    assert plan.peak_bytes <= of_a_gpu.peak_bytes
