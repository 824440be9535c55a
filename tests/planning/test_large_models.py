"""Models too large for this machine: what their plans must stay under, and what a plan itself may cost.

The HiFT paper's Tables 6 and 3 (arXiv 2401.15207) against plans of the same runs; its "MB" are MiB.

Not reproduced, each with its reason:

* #Sta of RoBERTa-base with Adafactor. The paper has 0.98 and 0.19 MiB, we count 1.31 and 0.208. Adafactor keeps a row
  and a column of every matrix and every vector whole, in fp32, and no state of that kind over this model gives the
  paper's cells (its 0.19 lies within two hundredths of ours by chance); LLaMA's, counted in the same way, agree.
* #Gra of 16-bit weights. The paper counts 4 bytes an element, as of the fp32 master's gradient; ours are in the
  weights' own 2 bytes, and are cast for one piece at a time.
"""

import resource
import time
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, RobertaConfig

from slivertune.planning.candidates import all_candidates
from slivertune.planning.configs import find_model
from slivertune.planning.make import make_plan
from slivertune.planning.plan import Limits, MemoryRequirement, Plan, add_allowance
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import search, start_of_search
from slivertune.training.command_line.plan_words import parse_plan_arguments
from tests.conftest import CHECKOUT
from tests.helpers.plan_requests import paper_request

pytestmark = pytest.mark.slow

GB, GIB, MIB = 10**9, 2**30, 2**20

LLAMA_7B = LlamaConfig()  # its defaults are those of the 7B model
LLAMA_3_8B = LlamaConfig(intermediate_size=14336, num_key_value_heads=8, vocab_size=128256)
LLAMA_3_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
)


def hift(**settings: Any) -> PlanRequest:
    return paper_request(precision="mixed_hi", gradient_checkpointing=True, **settings)


def most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    ("config", "settings", "limit"),
    [
        (LLAMA_7B, {"seq_length": 512}, 14.12 * GB),
        (LLAMA_7B, {"seq_length": 512, "gradients": "stepped"}, 13.87 * GB),
        pytest.param(
            LLAMA_7B,
            {"seq_length": 512, "gradients": "host", "layers_per_group": 34},
            14.5 * GB,
            marks=pytest.mark.slow,
        ),
        (LLAMA_3_8B, {"batch_size": 2, "seq_length": 2048}, 17.3 * GIB),
        (LLAMA_7B, {"seq_length": 16384}, 24 * GIB),
    ],
    ids=["7b", "7b-step-in-backward", "7b-all-layers", "8b-long", "7b-longest"],
)
def test_full_parameter_training_fits_where_it_must(config: Any, settings: Any, limit: float) -> None:
    plan = make_plan(hift(**settings), config)
    num_groups = sum(len(group.indices) for group in plan.groups)
    assert num_groups * settings.get("layers_per_group", 1) == 34, "every layer trains"
    assert plan.peak_bytes <= limit


@pytest.mark.parametrize(("model", "seq_length", "limit"), [("llama-3.1-8b", 512, 17.05), ("llama-2-7b", 1024, 14.03)])
def test_full_needs_hardly_more_than_an_optimizer_without_state(model: str, seq_length: int, limit: float) -> None:
    words = ["--model", model, "--method", "full", "--batch_size", "1", "--max_length", str(seq_length)]
    full = PlanRequest(**parse_plan_arguments(words).given)
    bare = replace(full, optimizer="sgd", master=None)
    needed, least = (add_allowance(make_plan(each, find_model(model).config)) for each in (full, bare))
    assert least.device_bytes < needed.device_bytes <= min(limit * GIB, least.device_bytes + 256 * MIB)
    assert (needed.host_bytes, needed.disk_bytes) == (0, 0)
    if model == "llama-3.1-8b":
        page = " ".join((CHECKOUT / "docs" / "hift.md").read_text(encoding="utf-8").split())
        assert f"Llama-3.1-8B needs {needed.device_bytes / GIB:.1f} GiB of the GPU, the allowance included" in page


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama-3.1-8b", "Llama-3.1-8B needs {:.1f} GiB of the GPU"),
        ("qwen3-32b", "with `--model qwen3-32b` {:.1f} GiB"),
        ("llama-3.1-70b", "with `--model llama-3.1-70b` {:.1f} GiB"),
    ],
)
def test_models_whose_layers_wait_in_nf4_need_what_docs_hift_md_says(model: str, words: str) -> None:
    pytest.importorskip("bitsandbytes")
    plan = make_plan(hift(seq_length=2048, waiting="nf4"), find_model(model).config)
    page = " ".join((CHECKOUT / "docs" / "hift.md").read_text(encoding="utf-8").split())
    assert words.format(add_allowance(plan).device_bytes / GIB) in page


@pytest.mark.parametrize(
    ("model", "limit", "host", "expected"),
    [
        ("llama-3.1-8b", 12 * GIB, None, {"weights": "host"}),
        ("qwen3-32b", 24 * GIB, None, {"weights": "host"}),
        ("llama-3.1-70b", 48 * GIB, None, {"weights": "host"}),
        # Where 13 GiB of weights wait, there is no room for the buffers of the disk.
        ("llama-3.1-8b", 12 * GIB, 14 * GIB, {"waiting": "int8", "state": "disk"}),
    ],
)
def test_a_model_larger_than_the_card_is_made_to_fit_in_a_few_plans(
    model: str, limit: int, host: int | None, expected: dict[str, str]
) -> None:
    config = find_model(model).config

    def estimate(request: PlanRequest) -> MemoryRequirement:
        return add_allowance(make_plan(request, config))

    limits = Limits(device_bytes=limit, host_bytes=host)
    start = start_of_search({"batch_size": 1, "seq_length": 2048, "layers_per_group": 1})
    found = search(start, all_candidates(), limits, estimate)
    changes = {name: new for step in found.steps for name, (_, new) in step.changes.items()}
    assert changes == {"gradient_checkpointing": True, **expected}
    assert found.num_plans <= (3 if host is None else 30)


def test_a_plan_of_70b_costs_blocks_times_that_of_8b_and_less_than_4_gb() -> None:
    # Time of this process alone, which other work does not stretch, and as a ratio, whatever the machine; 80 blocks
    # against 32, so that what is linear in them takes 2.5 times as long, and what is quadratic six times. Memory,
    # unless other tests took more before.
    make_plan(hift(), LlamaConfig(num_hidden_layers=2))  # what is imported once does not count
    start, before = time.process_time(), most_memory()
    make_plan(hift(), LLAMA_3_8B)
    middle = time.process_time()
    plan = make_plan(hift(), LLAMA_3_70B)
    assert time.process_time() - middle < 5 * (middle - start)
    assert most_memory() <= max(before, 4 * GB)
    assert plan.num_parameters == pytest.approx(70.55e9, rel=1e-3)
    assert plan.peak_bytes > 2 * plan.num_parameters


ROBERTA_BASE = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)

OPTIMIZERS: tuple[Any, ...] = ("adamw", "sgd_momentum", "sgd", "adafactor", "adagrad")
# Millions of parameters; then MiB of parameters, gradients and, by optimizer, state.
TABLE_6: dict[str, tuple[float, float, float, tuple[float, ...]]] = {
    "dense": (124.65, 475.49, 475.49, (950.98, 475.49, 0.00, 0.98, 475.49)),
    "hift": (39.00, 475.49, 148.77, (297.54, 148.77, 0.00, 0.19, 148.77)),
}
TABLE_3: dict[str, tuple[float, float, float, tuple[float, ...]]] = {
    "dense": (6738.42, 25705.04, 25705.04, (51410.08, 25705.04, 0.00, 10.82, 25705.04)),
    "hift": (202.38, 25705.04, 772.03, (1544.06, 772.03, 0.00, 0.33, 772.03)),
}
OUR_ROBERTA_ADAFACTOR = {"dense": 1.31, "hift": 0.208}


def plan_of(config: PreTrainedConfig, method: Any, optimizer: Any, precision: Any = "fp32") -> Plan:
    settings: dict[str, Any] = {"method": method, "optimizer": optimizer, "precision": precision, "stream_bytes": 0}
    if config is ROBERTA_BASE:
        return make_plan(paper_request(task="classification", batch_size=8, **settings), config)
    return make_plan(paper_request(batch_size=6, **settings), config)


def in_mib(value: float) -> Any:
    """The paper's cell: two decimals, of sums that were rounded in single precision for LLaMA."""
    return pytest.approx(value, abs=max(0.02, 2e-5 * value))


@pytest.mark.parametrize("method", ["dense", "hift"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("config", "table"), [(ROBERTA_BASE, TABLE_6), (LLAMA_7B, TABLE_3)], ids=["base", "7b"])
def test_fp32_takes_what_the_paper_counted(config: Any, table: Any, optimizer: Any, method: str) -> None:
    plan = plan_of(config, method, optimizer)
    trainable, parameters, gradients, states = table[method]
    state = states[OPTIMIZERS.index(optimizer)]
    if config is ROBERTA_BASE and optimizer == "adafactor":
        print(f"#Sta of RoBERTa-base, {method}, Adafactor: the paper {state}, ours {plan.state_bytes / MIB:.3f}")
        state = OUR_ROBERTA_ADAFACTOR[method]
    assert plan.num_trainable_peak / 1e6 == pytest.approx(trainable, abs=0.005)
    assert plan.parameter_bytes / MIB == in_mib(parameters)
    assert plan.gradient_bytes / MIB == in_mib(gradients)
    assert plan.state_bytes / MIB == in_mib(state)


@pytest.mark.parametrize(
    ("config", "method", "precision", "parameters"),
    [
        (ROBERTA_BASE, "dense", "mixed", 713.25),
        (ROBERTA_BASE, "hift", "mixed", 713.25),
        (LLAMA_7B, "dense", "mixed", 38557.56),
        (LLAMA_7B, "hift", "mixed", 38557.56),
        (LLAMA_7B, "hift", "mixed_hi", 13624.53),
    ],
)
def test_mixed_precision_holds_the_parameters_that_the_paper_counted(
    config: Any, method: Any, precision: Any, parameters: float
) -> None:
    assert plan_of(config, method, "adamw", precision).parameter_bytes / MIB == in_mib(parameters)


def test_gradients_of_16_bit_weights_take_half_of_what_the_paper_counted() -> None:
    plan = plan_of(LLAMA_7B, "hift", "adamw", "mixed_hi")
    assert 2 * plan.gradient_bytes / MIB == in_mib(772.03)
    assert plan.state_bytes / MIB == in_mib(1544.06)
