"""`--fit` against brute force: of all settings that it may change, none cheaper fits than those that it finds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
from transformers import BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig

from slivertune.planning.candidates import BUSY_TOKENS, SMALL_CHUNK_BYTES, TILE_SIZES, all_candidates
from slivertune.planning.make import make_plan
from slivertune.planning.methods import planned
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import DoesNotFitError, search, start_of_search
from tests.helpers.ranks import quick
from tests.planning.test_search import memory_of

pytestmark = pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks")

Estimator = Callable[[PlanRequest], MemoryRequirement]
A_LITTLE = 2**16
WAITING_FORMS = ("int8", "nf4")

_WIDTH: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}
_FOR_LONG: tuple[str, ...] = ("offload_activations", "token_tile_size")
_WEIGHTS: tuple[str, ...] = ("weights", "waiting")
_ONE_LAYER = ("layers_per_group",)
"""A quarter of the layers of a model with one block is one layer."""
CONFIGS: dict[str, PreTrainedConfig] = {
    "deep llama": LlamaConfig(**{**_WIDTH, "hidden_size": 512, "num_hidden_layers": 3}, intermediate_size=1408),
    "llama": LlamaConfig(**_WIDTH, intermediate_size=2816),
    "bert": BertConfig(**_WIDTH, intermediate_size=4096),
    "gpt2": GPT2Config(
        vocab_size=8192, n_embd=1024, n_layer=1, n_head=8, n_positions=2048, bos_token_id=0, eos_token_id=0
    ),
}
"""One block of a usual width: a plan takes no longer than that of a small one, and 32 MiB are a piece of it."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user asks `--fit` for."""

    model: str = ""
    given: dict[str, Any]
    fixed: tuple[str, ...] = ()
    """What else stays as it is."""
    min_seq_length: int | None = None

    @property
    def start(self) -> PlanRequest:
        return start_of_search({"batch_size": 1, "seq_length": 512, **self.given})

    def __str__(self) -> str:
        return f"{self.model} {' '.join(str(value) for value in (*self.given.values(), *self.fixed))}".strip()


MADE_UP = [
    Asked(given={"method": "hift", "batch_size": 16}),
    Asked(given={"method": "hift", "batch_size": 8, "seq_length": 2048}, fixed=("gradients",)),
    Asked(given={"method": "hift", "batch_size": 2, "seq_length": 2048}, fixed=("layout",), min_seq_length=1500),
    Asked(given={"method": "hift", "batch_size": 4, "precision": "mixed_hi"}, fixed=("precision",)),
    Asked(given={"method": "hift", "batch_size": 2, "seq_length": 16384}, fixed=("gradients", "optimizer")),
    Asked(given={"method": "dense", "batch_size": 8, "seq_length": 1024}),
    Asked(given={"method": "dense", "batch_size": 48}, fixed=("layout",), min_seq_length=256),
    Asked(given={"method": "sft", "batch_size": 16}),
    Asked(given={"method": "sft", "batch_size": 4, "seq_length": 2048}, fixed=("load_in_4bit",)),
    Asked(given={"method": "lora", "batch_size": 8, "seq_length": 1024}),
    Asked(given={"method": "lora", "batch_size": 8, "seq_length": 2048}, fixed=("load_in_4bit",), min_seq_length=1024),
]

REAL = [
    Asked(
        model="llama",
        given={"method": "hift"},
        fixed=("gradients", "gradient_checkpointing", "layout", "stream_bytes", *_FOR_LONG, *_WEIGHTS, *_ONE_LAYER),
    ),
    Asked(
        model="gpt2",
        given={"method": "dense", "batch_size": 2},
        fixed=("layout", "gradient_checkpointing", *_FOR_LONG),
        min_seq_length=400,
    ),
    Asked(
        model="llama",
        given={"method": "hift", "batch_size": 4, "seq_length": 1024},
        fixed=(
            "state",
            "precision",
            "optimizer",
            "gradients",
            "gradient_checkpointing",
            *_FOR_LONG,
            *_WEIGHTS,
            *_ONE_LAYER,
        ),
    ),
    Asked(
        model="gpt2",
        given={"method": "hift", "batch_size": 2, "seq_length": 2048},
        fixed=(
            "gradients",
            "gradient_checkpointing",
            "layout",
            "state",
            "optimizer",
            *_FOR_LONG,
            *_WEIGHTS,
            *_ONE_LAYER,
        ),
    ),
    Asked(
        model="bert",
        given={"method": "hift", "batch_size": 4, "seq_length": 1024, "task": "classification"},
        fixed=(
            "precision",
            "stream_bytes",
            "layout",
            "gradient_checkpointing",
            "state",
            "gradients",
            *_FOR_LONG,
            *_WEIGHTS,
            *_ONE_LAYER,
        ),
    ),
    Asked(model="llama", given={"method": "dense", "batch_size": 4, "seq_length": 1024}, fixed=("layout", "optimizer")),
    Asked(
        model="bert",
        given={"method": "sft", "batch_size": 4, "seq_length": 1024, "task": "classification"},
        fixed=("load_in_4bit", *_FOR_LONG),
    ),
    Asked(
        model="llama",
        given={"method": "sft", "batch_size": 4, "seq_length": 1024, "density": 0.05},
        fixed=("gradient_checkpointing", *_FOR_LONG),
    ),
    Asked(
        model="llama", given={"method": "lora", "batch_size": 4, "seq_length": 1024}, fixed=("optimizer", *_FOR_LONG)
    ),
    Asked(
        model="gpt2",
        given={"method": "lora", "batch_size": 4, "seq_length": 512},
        fixed=("gradient_checkpointing", *_FOR_LONG),
    ),
    Asked(
        model="deep llama",
        given={"method": "hift", "batch_size": 2, "seq_length": 2048, "gradient_checkpointing": True},
        fixed=(
            "stream_bytes",
            "gradients",
            "optimizer",
            "state",
            "precision",
            "master",
            "gradient_checkpointing",
            "layers_per_group",
        ),
    ),
    Asked(
        model="deep llama",
        given={"method": "hift", "seq_length": 512},
        fixed=("stream_bytes", "gradients", "optimizer", "precision", "gradient_checkpointing"),
    ),
]


def settings_of(asked: Asked) -> dict[str, list[Any]]:
    """The values that each setting may take, as docs/plan.md lists them."""
    start, own = asked.start, planned(asked.start.method).settings
    lengths = range(start.seq_length, (asked.min_seq_length or start.seq_length) - 1, -1)
    others: dict[str, tuple[tuple[str, ...], bool, list[Any]]] = {
        # What leaves it as it is where the user set it; whether the method has it at all; the other values.
        "stream_bytes": (("stream_bytes",), "stream_bytes" in own, [SMALL_CHUNK_BYTES]),
        "gradient_checkpointing": (("gradient_checkpointing",), True, [True]),
        "gradients": (("gradients",), "gradients" in own, ["host", "stepped"]),
        "offload_activations": (("offload_activations",), True, [True]),
        "token_tile_size": (("token_tile_size",), True, [*TILE_SIZES]),
        "weights": (("weights",), "weights" in own, ["host"]),
        "waiting": (("waiting",), start.method == "hift", [*WAITING_FORMS]),
        "layers_per_group": (("layers_per_group",), "layers_per_group" in own, [1]),
        "optimizer": (("optimizer",), not planned(start.method).is_optimizer, ["adamw8bit"]),
        "state": (("state",), "state" in own, ["disk"]),
        "precision": (("precision", "master"), start.precision != "bf16", ["bf16"]),
        "master": (("precision", "master"), start.precision != "bf16" and "master" in own, ["stochastic"]),
        "load_in_4bit": (("load_in_4bit", "precision"), True, [True]),
        "offload_parameters": (("offload_parameters", "layout", "num_gpus"), "weights" not in own, [True]),
    }
    values = {
        name: [getattr(start, name), *(more if has and not set(asked.fixed).intersection(guards) else [])]
        for name, (guards, has, more) in others.items()
    }
    values["batch_size"] = [size for size in range(start.batch_size, 0, -1) if start.batch_size % size == 0]
    values["seq_length"] = [
        length for length in lengths if length in (start.seq_length, asked.min_seq_length) or length % 128 == 0
    ]
    return values


def combinations(asked: Asked) -> Iterator[PlanRequest]:
    """Every request that the settings can be combined into."""
    start, values = asked.start, settings_of(asked)
    num_sequences = start.batch_size * start.gradient_accumulation_steps
    for chosen in product(*values.values()):
        changes = dict(zip(values, chosen, strict=True))
        changes["gradient_accumulation_steps"] = num_sequences // changes["batch_size"]
        if changes["offload_parameters"]:
            changes["layout"] = "fsdp2"
        # Weights in 4 bits are not streamed.
        if changes["offload_parameters"] and changes["load_in_4bit"]:
            continue
        if changes["master"] != start.master and changes["precision"] == start.precision:
            continue
        # A search takes one of both.
        if changes["waiting"] and changes["weights"] == "host":
            continue
        if (changes["token_tile_size"] or 0) >= changes["batch_size"] * changes["seq_length"]:
            continue
        try:
            yield replace(start, **changes)
        except (ValueError, ImportError):
            continue


def cost(start: PlanRequest, request: PlanRequest) -> tuple[int, ...]:
    """How far each setting is changed, the costliest first: the last row of the table in docs/plan.md to its first."""
    parts = 0 if request.batch_size == start.batch_size else start.batch_size // request.batch_size
    is_busy = request.batch_size * start.seq_length >= BUSY_TOKENS
    return (
        start.seq_length - request.seq_length,
        request.offload_parameters,
        start.method != "hift" and request.weights != start.weights,
        request.load_in_4bit,
        (request.precision != start.precision) * (1 if request.master == "stochastic" else 2),
        WAITING_FORMS.index(request.waiting) + 1 if request.waiting else 0,
        request.state != start.state,
        request.gradients == "stepped",
        request.optimizer != start.optimizer,
        request.layers_per_group != start.layers_per_group,
        start.method == "hift" and request.weights != start.weights,
        TILE_SIZES.index(request.token_tile_size) + 1 if request.token_tile_size else 0,
        request.gradients == "host",
        0 if is_busy else parts,
        request.offload_activations,
        request.gradient_checkpointing,
        parts if is_busy else 0,
        request.stream_bytes != start.stream_bytes,
    )


def some_limits(needs: list[MemoryRequirement], random: Random, number: int) -> Iterator[Limits]:
    """Limits that some of the combinations keep: of the GPU always, of the host and of the disk sometimes.

    They lie a little above or below what is needed: what differs by a step count or by the ids of a batch is the same.
    """
    on_device, on_host, on_disk = (
        sorted({getattr(need, name) for need in needs}) for name in ("device_bytes", "host_bytes", "disk_bytes")
    )
    for index in range(number):
        yield Limits(
            device_bytes=random.choice(on_device) + (A_LITTLE if index % 3 else -A_LITTLE),
            host_bytes=random.choice(on_host) + A_LITTLE if index % 2 else None,
            disk_bytes=random.choice(on_disk) + A_LITTLE if index % 4 == 3 else None,
        )


def assert_minimal(asked: Asked, estimate: Estimator, *, num_limits: int) -> None:
    start, needs = asked.start, dict[PlanRequest, MemoryRequirement]()
    for request in combinations(asked):
        try:
            needs[request] = estimate(request)
        except (ValueError, ImportError):
            continue
    costs = {request: cost(start, request) for request in needs}
    cheapest_found = set()
    for limits in some_limits(list(needs.values()), Random(str(asked)), num_limits):
        fitting = [costs[request] for request, need in needs.items() if need.fits(limits)]
        try:
            found = search(start, all_candidates(asked.min_seq_length), limits, estimate, fixed=asked.fixed)
        except DoesNotFitError:
            assert fitting == [], f"{limits}: something fits"
            continue
        assert found.requirement.fits(limits)
        assert found.requirement.plan.request in needs, f"{limits}: what is no combination was found"
        assert cost(start, found.requirement.plan.request) == min(fitting), f"{limits}: something cheaper fits"
        cheapest_found.add(min(fitting))
    assert len(cheapest_found) >= 3, "these limits need hardly anything to be changed"


ONE_OF_EACH = {asked.given["method"]: asked for asked in MADE_UP[:-1]}
"""By its method, what `make test` asks."""


@pytest.mark.parametrize("asked", quick(MADE_UP, ONE_OF_EACH.values()), ids=str)
def test_nothing_cheaper_fits_a_made_up_model_of_memory(asked: Asked) -> None:
    assert_minimal(asked, cache(memory_of), num_limits=40)


SPLIT_IN_VAIN = [asked for asked in REAL if asked.model == "bert" and "precision" in asked.fixed]
"""Where 8-bit state is chosen last, both ways to split the batch have to go."""


@pytest.mark.parametrize("asked", quick(REAL, SPLIT_IN_VAIN), ids=str)
def test_nothing_cheaper_fits_by_real_plans(asked: Asked) -> None:
    @cache
    def estimate(request: PlanRequest) -> MemoryRequirement:
        return add_allowance(make_plan(request, CONFIGS[asked.model]))

    assert_minimal(asked, estimate, num_limits=40)
