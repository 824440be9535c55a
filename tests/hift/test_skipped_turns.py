"""Groups that a batch does not reach: their turn passes, counted, without an update, and nobody else starves.

The reference computes every gradient of a dense model, throws away what the active group does not own, and hands the
turn on where nothing is left. The length of this file is that of the models: each way in which a batch can miss layers
has one.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.amp import GradScaler

from slivertune import HiFT, HiFTConfig
from tests.helpers.models import (
    BLOCKS,
    HIDDEN,
    VOCAB,
    assert_all_moved,
    assert_same_bits,
    differing,
    label_batches,
    seeded,
    small_decoder,
    tiny_bert,
    tiny_llama,
    token_batches,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.reference import NaiveHiFT, naive_groups
from tests.hift.cases import hift_over, reloaded, said

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class NaiveWithSkips(NaiveHiFT):
    """The reference of updates, in whose rotation a step without a gradient counts too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.skipped: dict[int, int] = {}

    def step(self) -> None:
        self.keep_active_gradients()
        if all(self.parameters[name].grad is None for name in self.active):
            if self.updates % self.cycle_length == 0:
                self.held = [group["lr"] for group in self.carrier.param_groups]
            index = self.order[self.updates // self.steps_per_group % len(self.groups)]
            self.skipped[index] = self.skipped.get(index, 0) + 1
            self.updates += 1  # a turn, here
            return
        super().step()


@dataclass(frozen=True)
class Case:
    """A model, and a loss of it in a step, which some groups may take no part in."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    skips: bool = True
    layers: Sequence[Sequence[str]] | None = None


def plain_bert() -> nn.Module:
    return seeded(lambda: hf.BertModel(tiny_bert().config, add_pooling_layer=True), 0)


def mean_of_tokens(model: nn.Module, step: int) -> torch.Tensor:
    return model(input_ids=label_batches(step + 1)[step]["input_ids"]).last_hidden_state.square().mean()


def pairs(model: nn.Module, step: int) -> torch.Tensor:
    """A loss over two calls of the model, as sentence embeddings are trained."""
    ids = label_batches(step + 1)[step]["input_ids"]
    left, right = (model(input_ids=each).last_hidden_state.mean(1) for each in (ids, ids.flip(1)))
    return nn.functional.cross_entropy(left @ right.T, torch.arange(len(ids)))


def opt(layerdrop: float) -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        ffn_dim=48,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        max_position_embeddings=32,
        dropout=0.0,
        layerdrop=layerdrop,
        use_cache=False,
        word_embed_proj_dim=HIDDEN,
    )
    return seeded(lambda: hf.OPTForCausalLM(config), 0)


def bart() -> nn.Module:
    config = hf.BartConfig(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=32,
        dropout=0.0,
        encoder_layerdrop=0.5,
        decoder_layerdrop=0.5,
        use_cache=False,
    )
    return seeded(lambda: hf.BartForConditionalGeneration(config), 0)


def random_layers(model: nn.Module, step: int) -> torch.Tensor:
    """A causal loss; which layers are dropped follows from the step."""
    torch.manual_seed(step)
    return model(**token_batches(step + 1)[step]).loss


TOWER = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**TOWER, "vocab_size": VOCAB, "max_position_embeddings": 32}
VISION = {**TOWER, "image_size": 8, "patch_size": 4}


def clip() -> nn.Module:
    text = {**TEXT, "eos_token_id": 1, "bos_token_id": 0}
    config = hf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    return seeded(lambda: hf.CLIPModel(config), 0)


def one_tower(model: Any, step: int) -> torch.Tensor:
    """Text features or image features, by the step: the other tower takes no part."""
    if step % 2:
        pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        features = model.get_image_features(pixel_values=pixels)
    else:
        features = model.get_text_features(input_ids=token_batches(step + 1)[step]["input_ids"])
    return getattr(features, "pooler_output", features).square().mean()


def llava() -> nn.Module:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION, projection_dim=16),
        text_config=hf.LlamaConfig(**TEXT, num_key_value_heads=2, use_cache=False),
        image_token_index=VOCAB - 1,
    )
    return seeded(lambda: hf.LlavaForConditionalGeneration(config), 0)


def text_alone(model: nn.Module, step: int) -> torch.Tensor:
    ids = torch.randint(0, VOCAB - 1, (2, 8), generator=torch.Generator().manual_seed(step))
    return model(input_ids=ids, labels=ids).loss


class Experts(nn.Module):
    """An embedding, one layer of four experts of which a batch uses one, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        hidden = hidden + torch.tanh(self.experts[int(input_ids.sum()) % 4](hidden))
        logits = self.head(hidden)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


CASES = {
    "an unused pooler under one call": Case(plain_bert, mean_of_tokens),
    "an unused pooler under two calls": Case(plain_bert, pairs),
    "dropped layers, OPT": Case(lambda: opt(0.4), random_layers),
    "dropped layers, BART": Case(bart, random_layers),
    "one of two towers": Case(clip, one_tower),
    "text alone in a vision-language model": Case(llava, text_alone),
    "experts, each a layer": Case(
        lambda: seeded(Experts, 0),
        random_layers,
        layers=[["embed"], *([f"experts.{index}"] for index in range(4)), ["head"]],
    ),
    "a model whose batch reaches everything": Case(small_decoder, random_layers, skips=False),
}

STEPS = 20


@contextmanager
def unheard() -> Iterator[None]:
    """Let warnings of skipped turns pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no (gradient|batch)")
        yield


def both(case: Case, **config: Any) -> tuple[nn.Module, HiFT, nn.Module, NaiveWithSkips]:
    other = twin(case.build())
    model, hift = hift_over(twin(other), torch.optim.AdamW, layers=case.layers, **config, **OPTIONS)
    reference = NaiveWithSkips(
        other,
        torch.optim.AdamW,
        groups=[group.parameter_names for group in hift.groups],
        order=hift.rotation.order,
        steps_per_group=hift.config.steps_per_group,
        discard=hift.config.state == "discard",
        **OPTIONS,
    )
    return model, hift, other, reference


def run(case: Case, model: nn.Module, optimizer: Any, steps: Iterable[int], micro_batches: int = 1) -> None:
    for step in steps:
        with unheard():
            for micro in range(micro_batches * step, micro_batches * (step + 1)):
                (case.loss(model, micro) / micro_batches).backward()
            optimizer.step()


@rotated(name=CASES, turns=[1, 2])
def test_a_group_that_no_gradient_reaches_passes_its_turn(name: str, turns: int) -> None:
    case = CASES[name]
    config: dict[str, Any] = {"steps_per_group": 2, "order": "top2down"} if turns == 2 else {}
    model, hift, other, reference = both(case, **config)
    before = weights(model)
    for step in range(STEPS):
        active, unreached, kept = hift.active_group, sum(hift.skipped_turns.values()), weights(model)
        run(case, model, hift, [step])
        run(case, other, reference, [step])
        reference.zero_grad()
        assert hift.updates + sum(hift.skipped_turns.values()) == step + 1
        assert hift.skipped_turns == reference.skipped
        if sum(hift.skipped_turns.values()) > unreached:
            assert hift.skipped_turns[active] and differing(weights(model), kept) == []
        assert_same_bits(model, other)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert bool(hift.skipped_turns) == case.skips
    if not case.skips:
        assert_all_moved(model, before)


@pytest.mark.parametrize(
    ("name", "micro_batches", "config"),
    [
        ("dropped layers, OPT", 1, {"gradients": "stepped"}),
        ("dropped layers, OPT", 1, {"steps_per_group": 3, "state": "discard"}),
        ("dropped layers, OPT", 1, {"state": "device"}),
        ("dropped layers, OPT", 1, {"state": "disk"}),
        ("dropped layers, OPT", 1, {"layers_per_group": 2, "stream_bytes": 4096}),
        # One of two that reaches the group makes an update.
        ("experts, each a layer", 2, {}),
    ],
    ids=str,
)
def test_skipped_turns_equal_the_reference_wherever_state_waits_and_over_micro_batches(
    name: str, micro_batches: int, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = {"state_dir": tmp_path} if config.get("state") == "disk" else {}
    model, hift, other, reference = both(CASES[name], **config, **folder)
    for step in range(STEPS + 6):  # two layers of a group are seldom dropped together
        run(CASES[name], model, hift, [step], micro_batches)
        run(CASES[name], other, reference, [step], micro_batches)
        reference.zero_grad()
        assert hift.skipped_turns == reference.skipped
        assert_same_bits(model, other)
    assert hift.skipped_turns and hift.updates


def test_a_step_without_a_backward_or_with_dropped_gradients_passes_nothing() -> None:
    case = CASES["an unused pooler under one call"]
    model, hift, _, _ = both(case)
    pooler = hift.num_groups - 1
    run(case, model, hift, range(pooler))
    assert hift.active_group == pooler
    hift.step()
    assert hift.skipped_turns == {}, "no backward ran"
    case.loss(model, 0)
    hift.step()
    assert hift.skipped_turns == {}, "a forward is no backward"
    with torch.no_grad():
        case.loss(model, 0)
    hift.step()
    assert hift.skipped_turns == {}
    run(case, model, hift, [0])
    assert hift.skipped_turns == {pooler: 1} and hift.active_group == 0
    case.loss(model, 0).backward()
    hift.zero_grad()
    with unheard():
        hift.step()
    assert hift.skipped_turns == {pooler: 1} and hift.active_group == 0, "gradients came, and were dropped"


def test_the_rate_is_read_in_a_cycles_first_step_even_if_that_is_skipped() -> None:
    case = CASES["an unused pooler under one call"]
    model, hift, _, _ = both(case, order="top2down")
    rates = []
    for step in range(2 * hift.num_groups):
        hift.param_groups[0]["lr"] = 1e-2 / (step + 1)
        run(case, model, hift, [step])
        rates += hift.held_lr
    assert rates == [1e-2] * hift.num_groups + [1e-2 / (hift.num_groups + 1)] * hift.num_groups
    assert hift.skipped_turns == {hift.num_groups - 1: 2}


def test_skipped_turns_resume_in_mid_cycle_to_the_bit() -> None:
    case = CASES["dropped layers, OPT"]
    model, hift, _, _ = both(case, steps_per_group=2)
    saves = []
    for step in range(STEPS):
        saves.append(reloaded({"model": model.state_dict(), "optimizer": hift.state_dict()}))
        run(case, model, hift, [step])
    assert hift.skipped_turns
    for start in range(1, STEPS, 4):
        again, resumed, _, _ = both(case, steps_per_group=2)
        again.load_state_dict(saves[start]["model"])
        resumed.load_state_dict(saves[start]["optimizer"])
        run(case, again, resumed, range(start, STEPS))
        assert resumed.skipped_turns == hift.skipped_turns and resumed.updates == hift.updates
        assert_same_bits(again, model)


class Halves(nn.Module):
    """Two heads over one input, each a layer, whose losses have a backward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(inputs).pow(2).mean(), self.other(inputs).pow(2).mean()


@pytest.mark.parametrize("forwards", ["one", "each before its backward", "all before"])
def test_a_backward_that_misses_the_group_takes_nothing_from_one_that_reaches_it(forwards: str) -> None:
    model = seeded(Halves, 0)
    layers = [["one"], ["other"]]
    hift = HiFT(model, torch.optim.SGD, config=HiFTConfig.paper(layers=layers), lr=0.1)
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for update in range(4):
        before = weights(model)
        active = "one" if update % 2 == 0 else "other"
        losses = model(inputs) if forwards == "one" else None
        more = [model(inputs) for _ in range(2)] if forwards == "all before" else None
        for index in (1, 0) if active == "one" else (0, 1):  # the missing one first
            now = more[index] if more else losses or model(inputs)
            now[index].backward(retain_graph=True)
        hift.step()
        moved = {name for name, weight in weights(model).items() if not torch.equal(weight, before[name])}
        assert moved == {f"{active}.weight", f"{active}.bias"}
        hift.zero_grad()


def test_a_state_of_before_turns_were_counted_is_read() -> None:
    _, hift = hift_over(small_decoder(), torch.optim.AdamW, **OPTIONS)
    saved = hift.state_dict()
    header = {key: value for key, value in saved["hift"].items() if not key.startswith("skipped")}
    hift.load_state_dict({**saved, "hift": {**header, "version": 1}})
    assert hift.skipped_turns == {}


@pytest.mark.parametrize("counts", [{7: 1}, {0: -1}, {"0": 1}, [1]])
@pytest.mark.parametrize("key", ["skipped_turns", "skipped_in_cycle"])
def test_counts_that_can_not_be_are_refused(key: str, counts: Any) -> None:
    _, hift = hift_over(small_decoder(), torch.optim.AdamW, **OPTIONS)
    saved = hift.state_dict()
    with pytest.raises(ValueError, match=f"damaged: {key}="):
        hift.load_state_dict({**saved, "hift": {**saved["hift"], key: counts}})


def test_a_skipped_group_is_told_once_and_named_after_a_cycle_that_never_reached_it() -> None:
    case = CASES["an unused pooler under two calls"]
    model, hift, _, _ = both(case)
    with said() as messages:
        for step in range(3 * hift.num_groups):
            case.loss(model, step).backward()
            hift.step()
    (skipped,) = [message for message in messages if "its turn passes" in message]
    (unreached,) = [message for message in messages if "whole cycle" in message]
    assert f"group {hift.num_groups - 1} (pooler.dense.weight and 1 more)" in skipped and "skipped_turns" in skipped
    assert "pooler.dense.weight, pooler.dense.bias" in unreached and "layers=" in unreached


def test_a_group_that_some_batch_of_the_cycle_reaches_is_not_called_unreached() -> None:
    case = CASES["dropped layers, OPT"]
    model, hift, _, _ = both(case, steps_per_group=20)
    with said() as messages:
        for step in range(hift.cycle_length):
            case.loss(model, step).backward()
            hift.step()
    assert hift.skipped_turns
    assert not [message for message in messages if "whole cycle" in message]


@pytest.mark.parametrize(
    ("name", "autocast", "unscale"),
    [
        ("an unused pooler under one call", torch.float16, False),
        ("an unused pooler under one call", torch.float16, True),
        ("an unused pooler under one call", torch.bfloat16, True),
        ("an unused pooler under one call", None, False),
        ("an unused pooler under two calls", None, True),
    ],
)
def test_a_grad_scaler_meets_a_skipped_turn_and_an_overflow(
    name: str, autocast: torch.dtype | None, unscale: bool
) -> None:
    case = CASES[name]
    model, hift, _, _ = both(case)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=10_000)
    overflows = 0
    for step in range(2 * hift.num_groups + 3):
        with unheard():
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = case.loss(model, step)
            scaler.scale(loss).backward()
            if step in (2, 9):
                reached = next(each for each in model.parameters() if each.grad is not None and each.grad.any())
                reached.grad.view(-1)[0] = math.inf
                overflows += 1
            if unscale:
                scaler.unscale_(hift)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(hift)
            scaler.update()
            hift.zero_grad()
        assert hift.updates + sum(hift.skipped_turns.values()) == step + 1 - overflows
    assert hift.skipped_turns == {hift.num_groups - 1: 2} and overflows == 2
    assert scaler.get_scale() == 2.0 ** (8 - 2)


@pytest.mark.parametrize("kind", ["dict", "tuple", "list", "named", "dataclass", "nested", "tensor"])
def test_whatever_a_model_returns_can_be_led_into_a_backward(kind: str) -> None:
    class Named(SimpleNamespace):
        pass

    @dataclass
    class Output:
        loss: torch.Tensor
        note: str = "kept"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor) -> Any:
            loss = self.used(inputs).square().mean()
            count = torch.tensor(3)
            return {
                "dict": {"loss": loss, "count": count},
                "tuple": (loss, count),
                "list": [loss, count],
                "named": Named(loss=loss, count=count),
                "dataclass": Output(loss),
                "nested": {"inner": [(loss,)], "count": count},
                "tensor": loss,
            }[kind]

    def loss_of(output: Any) -> torch.Tensor:
        if isinstance(output, torch.Tensor):
            return output
        if kind == "nested":
            return output["inner"][0][0]
        if kind in ("tuple", "list"):
            assert isinstance(output, tuple if kind == "tuple" else list) and output[1].item() == 3
            return output[0]
        return output["loss"] if kind == "dict" else output.loss

    model, hift = hift_over(seeded(Model, 0), torch.optim.AdamW, layers=[["unused"], ["used"]], **OPTIONS)
    inputs = torch.randn(3, 4)
    with torch.no_grad():
        plain = loss_of(model(inputs))
    output = model(inputs)
    assert torch.equal(loss_of(output), plain) and loss_of(output).requires_grad
    if kind == "dataclass":
        assert output.note == "kept"
    with unheard():
        loss_of(output).div_(2).backward()
        hift.step()
    assert hift.skipped_turns == {0: 1} and hift.active_group == 1
    last = loss_of(model(inputs)).grad_fn
    assert type(last).__name__ == "MeanBackward0", "what requires a gradient is left as it is"


def test_calls_of_a_part_and_forwards_that_fail_are_watched_too() -> None:
    layers = [["model.embed_tokens"], *([f"model.layers.{index}"] for index in range(3)), ["model.norm"], ["lm_head"]]
    model, hift = hift_over(tiny_llama(), torch.optim.AdamW, layers=layers, order="top2down", **OPTIONS)
    ids = token_batches(1)[0]["input_ids"]
    with pytest.raises(TypeError):
        model(ids, unknown_argument=1, labels="no")
    with unheard():
        # The backbone without its head, whose turn it is.
        model.model(input_ids=ids).last_hidden_state.square().mean().backward()
        hift.step()
    assert hift.skipped_turns == {hift.num_groups - 1: 1} and hift.active_group == hift.num_groups - 2


def test_a_copy_of_the_model_is_not_watched() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, order="top2down", **OPTIONS)
    twin(model)(**token_batches(1)[0]).loss.backward()
    hift.step()
    assert hift.updates == 0 and hift.skipped_turns == {}
    assert naive_groups(model, 1)[-1] == list(hift.groups[-1].parameter_names)
