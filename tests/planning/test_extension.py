"""Plans extended from three models with few blocks, against plans that run all blocks."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from transformers import MixtralConfig, Qwen2Config, WhisperConfig

from slivertune.planning import fewer_blocks, make
from slivertune.planning.configs import find_model
from slivertune.planning.course import Course
from slivertune.planning.extension import Extension, ExtensionError
from slivertune.planning.make import Planner, make_plan
from slivertune.planning.model import build_model
from slivertune.planning.plan import Plan
from slivertune.planning.request import PlanRequest
from slivertune.planning.shipped import SHIPPED_MODELS
from slivertune.planning.step_work import Work
from tests.helpers.plan_requests import paper_request
from tests.helpers.ranks import quick
from tests.planning.made import narrow_llama
from tests.planning.test_images_and_speech import PLANS_WHISPER

NUM_BLOCKS = 9
ALL_BLOCKS = f"all {NUM_BLOCKS} blocks were run: fewer did not suffice"
BF16 = {"precision": "bf16"}
FULL = {
    "layers_per_group": "all",
    "steps_per_group": 1,
    "gradients": "stepped",
    "state": "device",
    "master": "stochastic",
    "optimizer": "adafactor",
    **BF16,
}
WAYS: dict[str, dict[str, Any]] = {
    "dense": {"method": "dense", **BF16},
    "dense, autocast": {"method": "dense", "precision": "mixed"},
    "full": {"method": "hift", **FULL},
    "HiFT, 1 layer": {"method": "hift", "layers_per_group": 1, "precision": "mixed_hi"},
    "HiFT, 3 layers": {"method": "hift", "layers_per_group": 3, "precision": "mixed_hi"},
    "HiFT, all layers": {
        "method": "hift",
        "layers_per_group": "all",
        "gradients": "host",
        "stream_bytes": 2**16,
        "precision": "mixed_hi",
    },
    "HiFT, gradients on the host": {"method": "hift", "layers_per_group": 1, "gradients": "host", "precision": "fp32"},
    "HiFT, weights on the host": {"method": "hift", "layers_per_group": 1, "weights": "host", "precision": "mixed_hi"},
    "HiFT, int8": {"method": "hift", "layers_per_group": 1, "waiting": "int8", "precision": "mixed_hi"},
    "SFT (AG)": {"method": "sft", "density": 0.05, **BF16},
    "SFT (MA)": {"method": "sft", "density": 0.05, "selection": "momentum", **BF16},
    "LoRA": {"method": "lora", **BF16},
    "QLoRA": {"method": "lora", "load_in_4bit": True, **BF16},
    "parked": {"method": "lora", "waiting": "nf4", "weights": "host", **BF16},
}
OTHERS: dict[str, dict[str, Any]] = {
    "TokenTune": {**WAYS["HiFT, 1 layer"], "token_ratio": 0.3},
    "accumulation": {**WAYS["HiFT, 1 layer"], "gradient_accumulation_steps": 3},
    "offloaded inputs": {**WAYS["LoRA"], "offload_activations": True},
    "tiles": {**WAYS["LoRA"], "token_tile_size": 32},
    "two keep theirs": {**WAYS["HiFT, 1 layer"], "keep_activations": 2},
    "all keep theirs": {**WAYS["HiFT, 1 layer"], "gradient_checkpointing": False},
    "CPU": {**WAYS["LoRA"], "kernels": "cpu"},
}
SLIDING_FIRST = Qwen2Config(
    vocab_size=200,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=NUM_BLOCKS + 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_sliding_window=True,
    sliding_window=16,
    layer_types=["sliding_attention"] * 2 + ["full_attention"] * NUM_BLOCKS,
)
MIXTURE = MixtralConfig(
    vocab_size=200,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=NUM_BLOCKS,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
)


def plan_of_all(request: PlanRequest, config: Any) -> Plan:
    """The plan that runs all blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fewer_blocks, "_MOST_SHARE", 0)
        return make_plan(request, config)


def request_of(way: str, **others: Any) -> PlanRequest:
    return paper_request(
        **{"gradient_checkpointing": True, "seq_length": 64, "kernels": "gpu", **(WAYS | OTHERS)[way], **others}
    )


QUICK_WAYS = ("dense", "HiFT, 1 layer", "SFT (AG)", "QLoRA", "CPU")


@pytest.mark.parametrize("way", quick([*WAYS, *OTHERS], QUICK_WAYS))
def test_a_plan_of_few_blocks_is_that_of_all(way: str, measured: list[int]) -> None:
    num_blocks = NUM_BLOCKS if "3 layers" not in way else 19
    request, config = request_of(way), narrow_llama(num_blocks)
    plan = make_plan(request, config)
    assert len(measured) >= 3 and max(measured) < num_blocks
    assert plan == plan_of_all(request, config)


KINDS = {"sliding first": SLIDING_FIRST, "mixture": MIXTURE}


@pytest.mark.parametrize(
    ("kind", "way"),
    quick(product(KINDS, ["LoRA", "HiFT, 1 layer"]), [("sliding first", "LoRA"), ("mixture", "HiFT, 1 layer")]),
)
def test_other_kinds_of_blocks_are_extended(kind: str, way: str, measured: list[int]) -> None:
    config: Any = KINDS[kind]
    plan = make_plan(request_of(way), config)
    assert len(measured) >= 3 and max(measured) < config.num_hidden_layers
    assert plan == plan_of_all(request_of(way), config)


OF_ALL_BLOCKS: list[dict[str, Any]] = [
    {"way": "LoRA", "weights": "host", "resident_bytes": 2**20},
    {"way": "HiFT, 1 layer", "layers": ("model.embed_tokens", "model.layers.*", "model.norm+lm_head")},
    {"way": "HiFT, all layers", "stream_bytes": 2**27},
    {"way": "SFT (AG)", "density": None, "num_weights": 10_000},
    {"way": "LoRA", "weights": "host", "device_bytes": 2**26},
    {"way": "HiFT, 1 layer", "prefetch_bytes": 2**20},
    {"way": "SFT (AG)", "density": None, "equivalent_lora_rank": 2, "train_embeddings": True},
    {"way": "HiFT, all layers", "precision": "bf16", "optimizer": "sgd"},
]


@pytest.mark.parametrize("settings", quick(OF_ALL_BLOCKS, OF_ALL_BLOCKS[:4]), ids=str)
def test_what_depends_on_all_blocks_runs_them_and_says_nothing(settings: dict[str, Any], measured: list[int]) -> None:
    """In a small model a budget of bytes holds all weights, in a large one a part."""
    plan = make_plan(request_of(**settings), narrow_llama(NUM_BLOCKS))
    assert measured == [NUM_BLOCKS] and ALL_BLOCKS not in plan.notes


@pytest.mark.parametrize(("num_blocks", "keep", "expected"), [(20, 0, False), (24, 0, True), (24, 2, False)])
def test_models_with_few_blocks_run_all(num_blocks: int, keep: int, expected: bool) -> None:
    config, request = narrow_llama(num_blocks), request_of("LoRA", keep_activations=keep)
    found = fewer_blocks.fewer_blocks(request, config, build_model(request, config))
    assert (found is not None) is expected


def test_batches_share_the_small_models(measured: list[int]) -> None:
    request, config = request_of("HiFT, 1 layer"), narrow_llama(NUM_BLOCKS)
    planner = Planner(config)
    plans = [
        planner.plan(replace(request, batch_size=size, token_ratio=ratio))
        for size, ratio in ((1, None), (3, None), (2, 0.5))
    ]
    assert measured == [3, 4, 5, 3, 4, 5, 4, 5, 6]
    for plan in plans[1:]:
        assert plan.to_json() == plan_of_all(plan.request, config).to_json()


def test_blocks_that_differ_in_the_end_are_all_run(measured: list[int]) -> None:
    config = narrow_llama(NUM_BLOCKS)
    config.layer_types = ["full_attention"] * (NUM_BLOCKS - 1) + ["sliding_attention"]
    plan = make_plan(request_of("LoRA"), config)
    assert measured == [NUM_BLOCKS] and ALL_BLOCKS not in plan.notes


def test_where_a_further_block_is_not_as_predicted_all_are_run_and_a_line_says_so(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block's work or memory beyond the fourth, which the smallest models do not have, is another."""
    shorter = fewer_blocks.shorter

    def odd(config: Any, num_blocks: int) -> Any:
        made = shorter(config, num_blocks)
        made.vocab_size += num_blocks**2
        return made

    monkeypatch.setattr(make, "shorter", odd)
    request, config = request_of("LoRA"), narrow_llama(NUM_BLOCKS)
    plan = make_plan(request, config)
    assert measured == [3, 4, 5, 6, NUM_BLOCKS] and plan.notes[-1] == ALL_BLOCKS
    assert replace(plan, notes=plan.notes[:-1]) == plan_of_all(request, config)


@PLANS_WHISPER
def test_a_model_with_an_encoder_and_a_decoder_runs_all_blocks(measured: list[int]) -> None:
    config = WhisperConfig(
        vocab_size=200, d_model=32, encoder_layers=NUM_BLOCKS, decoder_layers=NUM_BLOCKS, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20,
        max_target_positions=80, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    make_plan(request_of("LoRA", task="speech"), config)
    assert measured == [NUM_BLOCKS]


def test_a_small_model_with_other_blocks_is_not_measured(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = fewer_blocks.shorter

    def wider(config: Any, num_blocks: int) -> Any:
        made = shorter(config, num_blocks)
        made.intermediate_size *= 2
        return made

    monkeypatch.setattr(make, "shorter", wider)
    plan = make_plan(request_of("LoRA"), narrow_llama(NUM_BLOCKS))
    assert measured == [NUM_BLOCKS] and plan.notes[-1] == ALL_BLOCKS


def test_a_warning_has_the_numbers_of_the_whole_model(measured: list[int]) -> None:
    request = request_of("SFT (AG)", density=None, equivalent_lora_rank=None, sft_target_modules=("k_proj",))
    config = narrow_llama(NUM_BLOCKS)
    num_elements = NUM_BLOCKS * config.hidden_size**2 // 2
    with pytest.warns(UserWarning, match="the default number of weights") as warned:
        make_plan(request, config)
    assert [f"than the {num_elements} of the targets" in str(each.message) for each in warned] == [True]


def test_an_error_of_a_small_model_is_not_shown(monkeypatch: pytest.MonkeyPatch, measured: list[int]) -> None:
    def broken(config: Any, num_blocks: int) -> Any:
        raise IndexError("a list of all blocks")

    monkeypatch.setattr(make, "shorter", broken)
    plan = make_plan(request_of("LoRA"), narrow_llama(NUM_BLOCKS))
    assert measured == [NUM_BLOCKS] and plan.notes[-1] == ALL_BLOCKS


PATTERNS = [
    ("aaaaaaaaaaaa", (1, 0)),
    ("abababababab", (2, 0)),
    ("aaabaaabaaab", (4, 0)),
    ("xyaaaaaaaaaa", (1, 2)),
    ("xababababab", (2, 1)),
    ("aaaaaaaaaaaz", (12, 0)),
    ("abcdefghijkl", (12, 0)),
]


@pytest.mark.parametrize(("blocks", "expected"), PATTERNS)
def test_the_period_of_blocks(blocks: str, expected: tuple[int, int]) -> None:
    assert fewer_blocks._period(list(blocks)) == expected


@pytest.mark.parametrize("model", ["gemma-3-27b", "gpt-oss-20b", "smollm3-3b", "gpt-neo-2.7b", "llama-3-70b"])
def test_a_shorter_model_has_the_lowest_blocks(model: str) -> None:
    config = find_model(model).config
    text = config.get_text_config()
    request = PlanRequest(task=find_model(model).tasks()[0])
    whole, short = (
        fewer_blocks._signatures(fewer_blocks.text_blocks(build_model(request, each), each), each)
        for each in (config, fewer_blocks.shorter(config, 8))
    )
    assert len(whole) == text.num_hidden_layers and short == whole[:8]


EXTENSION = Extension(period=1, num_periods=7)


def naive_moments(num_blocks: int, *, loops: int = 1, bend: int = 0) -> np.ndarray:
    """A beginning, two moments for each block of each loop, which keeps some bytes, and an end."""
    moments, kept = [(5, 0, 0, 0, 0)], 0
    for loop, block in product(range(loops), range(num_blocks)):
        kept += 10 + bend * block**2
        moments += [(9 * num_blocks, loop, 0, kept + 100, block), (9 * num_blocks, loop, 0, kept, block)]
    moments.append((9 * num_blocks, 8, 0, 50 + kept, num_blocks))
    return np.array(moments, dtype=np.int64)


@pytest.mark.parametrize("loops", [1, 2, 3])
def test_a_course_has_the_peak_and_the_highest_bytes_of_all_blocks(loops: int) -> None:
    few = [naive_moments(number, loops=loops) for number in (3, 4, 5)]
    found, expected = EXTENSION._course("", few), Course(naive_moments(10, loops=loops))
    assert found.peak == expected.peak
    for kind in ("parameters", "gradients", "residual", "host_activations"):
        assert found.highest_of(kind) == expected.highest_of(kind)


def test_a_course_that_grows_unevenly_has_no_extension() -> None:
    with pytest.raises(ExtensionError, match="none like it"):
        EXTENSION._course("", [naive_moments(number, bend=1) for number in (3, 4, 5)])
    with pytest.raises(ExtensionError, match="moments"):
        EXTENSION._course("", [naive_moments(number) for number in (3, 4, 6)])


def test_numbers_grow_evenly_or_not_at_all() -> None:
    assert EXTENSION._number("", (4, 6, 8)) == 18
    with pytest.raises(ExtensionError, match="bytes is 4, 6, 9"):
        EXTENSION._number("bytes", (4, 6, 9))
    with pytest.raises(ExtensionError, match="name is 'a', 'b', 'a'"):
        EXTENSION._value("name", ("a", "b", "a"))
    with pytest.raises(ExtensionError, match="1, 2, 1 items"):
        EXTENSION._value("notes", (("a",), ("a", "b"), ("a",)))


def work(**counts: int) -> Work:
    return Work(operators=Counter({(len(name), 1): count for name, count in counts.items()}))


def test_operators_of_a_block_are_repeated_and_those_on_all_blocks_are_larger() -> None:
    found = EXTENSION._value("", [Work(operators=Counter({(2, 3): n, (0, 7 * n): 1})) for n in (3, 4, 5)])
    assert found == Work(operators=Counter({(2, 3): 10, (0, 70): 1}))
    with pytest.raises(ExtensionError, match="costs of their own"):
        EXTENSION._value("", [Work(operators=Counter({(0, n): 1 for n in range(m)})) for m in (3, 4, 5)])


def test_the_work_of_blocks_is_repeated_where_they_are_alike() -> None:
    def of(number: int) -> dict[Any, Work]:
        """Trained below, then frozen, then one that loads nothing, each again before; and the head."""
        blocks = {
            (index, again): work(aaa=1) if again else work(b=1) if index < 1 else work(cc=2)
            for index in range(number - 1)
            for again in (False, True)
        }
        return {**blocks, (number - 1, False): work(dddd=1), (number - 1, True): work(aaa=1), None: work(eeeee=7)}

    found = EXTENSION._value("", [of(number) for number in (3, 4, 5)])
    assert found == of(10)
    with pytest.raises(ExtensionError, match="differs between blocks"):
        EXTENSION._value("", [of(3), of(4), of(4)])


def check_drawn_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """25 of all models, ways, lengths, with checkpointing and without; those that can't be planned have one error."""
    extended = list[int]()
    extend = fewer_blocks.FewerBlocks.extend

    def watched(self: Any, *args: Any) -> Any:
        steps = extend(self, *args)
        extended.append(self.first)
        return steps

    monkeypatch.setattr(fewer_blocks.FewerBlocks, "extend", watched)
    lengths = (512, 2048)
    drawn = random.Random(1).sample(list(product(SHIPPED_MODELS, DRAWN_WAYS, (True, False), lengths)), 300)
    for model, way, checkpoints, length in drawn[25 * seed : 25 * seed + 25]:
        found = find_model(model)
        task = found.tasks()[0]
        settings = {"task": task, "gradient_checkpointing": checkpoints, "seq_length": length, **DRAWN_WAYS[way]}
        if task == "classification":
            settings["seq_length"] = length // 4
        request = paper_request(batch_size=2, kernels="gpu", **settings)
        num_extended = len(extended)
        plan = outcome(make_plan, request, found.config)
        if len(extended) > num_extended:  # otherwise it is the plan of all blocks
            assert plan == outcome(plan_of_all, request, found.config), (model, way, checkpoints, length)
    assert len(extended) >= 8, "of 25"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks, and no weight of the head")
class TestDrawnPlansOfEvenSeeds:
    """One of two classes, since a test process is given whole classes, and each seed takes minutes."""

    @pytest.mark.parametrize("seed", range(0, 12, 2))
    def test_those_of_all_blocks(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        check_drawn_plans(seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks, and no weight of the head")
class TestDrawnPlansOfOddSeeds:
    """The other half."""

    @pytest.mark.parametrize("seed", range(1, 12, 2))
    def test_those_of_all_blocks(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        check_drawn_plans(seed, monkeypatch)


def outcome(plan: Callable[..., Plan], *args: Any) -> Plan | str:
    """A plan, or the error of a run that can't be planned."""
    try:
        return plan(*args)
    except ValueError as error:
        return str(error)


DRAWN_WAYS = {
    **WAYS,
    "HiFT, a quarter": {"method": "hift", "layers_per_group": 0.25, "precision": "mixed_hi"},
    "HiFT, all layers": {"method": "hift", "layers_per_group": "all", "gradients": "host", "precision": "mixed_hi"},
    "SFT (AG), default number": {"method": "sft", **BF16},
}
