"""Wrong input ends in an error that names the value and the way out, and nothing is lost by it."""

import copy
import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import slivertune
from slivertune import HiFT, HiFTConfig, TokenTune
from slivertune.core.typed_command import naming_options
from tests.helpers.models import (
    LAYERS,
    assert_same_bits,
    assert_same_tree,
    bits,
    differing,
    small_decoder,
    tiny_gpt2,
    tiny_llama,
    token_batches,
    trainable,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.ranks import quick
from tests.helpers.reference import decay_split, grouped_optimizer, naive_groups, train
from tests.hift.cases import full_disk, hift_over, reloaded, said
from tests.training.test_callbacks import make_trainer

BLOCKS = [["model.embed_tokens"], ["model.layers.0"], ["model.layers.1"], ["model.layers.2"]]
HEAD = ["model.norm", "lm_head"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "sideways"}, "sideways.*bottom2up.*top2down.*random"),
        ({"layers_per_group": 0}, "layers_per_group=0"),
        ({"layers_per_group": -2}, "layers_per_group=-2"),
        *(
            ({"layers_per_group": value}, re.escape(f"layers_per_group={value!r} must be a number of layers"))
            for value in ("2", "0.25", 0.0, 1.0, -0.5, float("nan"), True, None)
        ),
        ({"steps_per_group": 0}, "steps_per_group=0"),
        ({"elementwise": "no"}, "elementwise='no' must be True or False"),
        ({"state": "cloud"}, "cloud.*host.*device.*disk.*discard"),
        ({"master": "fp64"}, "fp64.*fp32.*none.*stochastic"),
        ({"stream_bytes": -1}, "stream_bytes=-1"),
        ({"stream_bytes": "auto"}, "stream_bytes='auto' must be a size, such as 24GiB"),
        ({"prefetch_bytes": "64 boxes"}, "prefetch_bytes='64 boxes' must be a size, .*, or auto"),
        ({"prefetch_bytes": 1.5}, "prefetch_bytes=1.5 must be an integer"),
        ({"state": "disk"}, "state_dir"),
        ({"state": "host", "state_dir": "somewhere"}, "somewhere.*disk"),
        (
            {"inactive": "above", "gradients": "stepped", "inactive_rate": 0.0},
            "inactive_rate=0.0 must be a number over",
        ),
        ({"inactive_rate": 0.5}, 'inactive_rate=0.5.*inactive="frozen"'),
        ({"state_ram_bytes": 5}, 'state_ram_bytes=5.*state="host".*state="disk"'),
        ({"state": "disk", "state_dir": "d", "state_ram_bytes": -1}, "state_ram_bytes=-1"),
        ({"master": "split"}, "'split' was removed: fp32 trains with the same bits.* Use that"),
    ],
)
def test_a_wrong_choice_is_named_with_the_right_ones(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        HiFTConfig.paper(**options)


def test_sizes_may_be_texts_as_in_a_run_file() -> None:
    places: dict[str, Any] = {"state": "disk", "state_dir": "d", "weights": "host"}
    texts = {
        "device_bytes": "1GiB",
        "stream_bytes": "64MiB",
        "state_ram_bytes": "2 GB",
        "prefetch_bytes": "auto",
        "resident_bytes": "512",
    }
    numbers: dict[str, Any] = {
        "device_bytes": 2**30,
        "stream_bytes": 2**26,
        "state_ram_bytes": 2 * 10**9,
        "resident_bytes": 512,
    }
    assert HiFTConfig(**places, **texts) == HiFTConfig(**places, **numbers)


def _adapter_for_inference(folder: Path) -> nn.Module:
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(tiny_llama(), adapter).save_pretrained(str(folder))
    return PeftModel.from_pretrained(tiny_llama(), str(folder))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
@pytest.mark.parametrize("built", ["HiFT", "HiFT.wrap", "attach", "attach TokenTune"])
@pytest.mark.parametrize("make", [_adapter_for_inference, lambda _: small_decoder().requires_grad_(False)])
def test_a_model_of_which_nothing_trains_is_told_so(make: Callable[[Path], Any], built: str, tmp_path: Path) -> None:
    model = make(tmp_path)
    build: Callable[[], Any] = {
        "HiFT": lambda: HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-3),
        "HiFT.wrap": lambda: HiFT.wrap(torch.optim.AdamW([{"params": []}], lr=1e-3), model, config=HiFTConfig.paper()),
        "attach": lambda: slivertune.attach(make_trainer(tmp_path, model=model), HiFTConfig.paper()),
        "attach TokenTune": lambda: slivertune.attach(make_trainer(tmp_path, model=model), TokenTune(ratio=0.5)),
    }[built]
    with pytest.raises(ValueError, match=r"no parameter of the model requires a gradient\. .* is_trainable=True"):
        build()


@pytest.mark.parametrize(
    ("dtype", "config", "message"),
    [
        (torch.float32, {"layers_per_group": 6}, r"layers_per_group=6.*5"),
        (torch.float32, {"layers_per_group": "auto"}, "'auto' is chosen by slivertune.attach and by slivertune train"),
        (torch.float32, {"layers": [*BLOCKS, [], HEAD]}, "empty"),
        (torch.float32, {"layers": [*BLOCKS, ["lm_head"]]}, r"model\.norm\.weight"),
        (torch.float32, {"layers": [*BLOCKS, ["model.layers.17"], HEAD]}, r"model\.layers\.17"),
        (torch.float16, {}, "bf16|bfloat16"),
        (torch.float16, {"master": "stochastic"}, "bf16|bfloat16"),
        (torch.float32, {"master": "stochastic"}, r"'stochastic' .* train are torch\.float32\. Load the model in"),
    ],
    ids=[
        "too many layers a group",
        "no number of layers",
        "an empty layer",
        "an orphan",
        "nothing of that name",
        "fp16",
        "fp16, rounded",
        "nothing to round",
    ],
)
def test_what_it_can_not_be_built_over_is_named_and_the_model_does_not_stay_frozen(
    dtype: torch.dtype, config: dict[str, Any], message: str
) -> None:
    model = small_decoder(dtype)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        hift_over(model, torch.optim.AdamW, lr=0.1, **config)
    assert trainable(model) == {name for name, _ in model.named_parameters()}


def test_explicit_layers_are_the_layers() -> None:
    layers = [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.layers.2"], HEAD]
    model, hift = hift_over(small_decoder(), torch.optim.SGD, layers=layers, lr=0.1)
    assert [set(group.parameter_names) for group in hift.groups] == [set(group) for group in naive_groups(model, 2)]


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"requires_grad|trainable|frozen"):
        HiFT(small_decoder().requires_grad_(False), torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-3)


FROZEN: dict[str, Callable[[str], bool]] = {
    "a whole layer": lambda name: name.startswith("model.embed_tokens"),
    "a layer in the middle": lambda name: name.startswith("model.layers.1."),
    "the last layer": lambda name: name.startswith(("model.norm", "lm_head")),
    "a part of each layer": lambda name: "proj" in name,
    "all but one tensor": lambda name: name != "model.layers.2.mlp.up_proj.weight",
}


BUILT = ["from the class", "over what trains", "over all parameters"]
LAYERS_OF_FROZEN = [
    (which, count) for which in FROZEN for count in (1, 2) if (which, count) != ("all but one tensor", 2)
]
"""Each model has one quick way to build it; the ways take turns."""


@pytest.mark.parametrize(
    ("which", "layers_per_group", "built"),
    quick(
        [(*frozen, built) for frozen in LAYERS_OF_FROZEN for built in BUILT],
        [(*frozen, BUILT[index % 3]) for index, frozen in enumerate(LAYERS_OF_FROZEN)],
    ),
)
def test_parameters_frozen_by_the_user_stay_frozen_and_it_is_said_once(
    which: str, layers_per_group: int, built: str
) -> None:
    model = small_decoder()
    kept = {name for name, _ in model.named_parameters() if FROZEN[which](name)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in kept)
    config = HiFTConfig.paper(layers_per_group=layers_per_group)
    before = weights(model)
    with said() as messages:
        if built == "from the class":
            hift = HiFT(model, torch.optim.AdamW, config=config, lr=1e-2)
        else:
            chosen = [p for p in model.parameters() if p.requires_grad or built == "over all parameters"]
            hift = HiFT.wrap(torch.optim.AdamW(chosen, lr=1e-2), model, config=config)
        for update in range(2 * hift.cycle_length):
            assert trainable(model), "a group without a trainable parameter would never be left"
            assert not trainable(model) & kept
            train(model, hift, token_batches(1), 1, start=update)
        assert hift.updates == 2 * hift.cycle_length
    assert len([each for each in messages if "frozen" in each or "requires_grad" in each]) == 1, messages
    assert set(differing(weights(model), before)) == set(before) - kept


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    model, other = small_decoder(), small_decoder()
    for parameters in (other.parameters(), [*model.parameters(), nn.Parameter(torch.zeros(7))]):
        with pytest.raises(ValueError, match="parameter"):
            HiFT.wrap(torch.optim.AdamW(parameters, lr=1e-3), model, config=HiFTConfig.paper())
    assert trainable(model) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_that_has_taken_steps_is_refused(optimizer_class: Any) -> None:
    model = small_decoder()
    base = optimizer_class(model.parameters(), lr=1e-3)
    train(model, base, token_batches(1), 1)
    before = copy.deepcopy(base.state_dict())
    with pytest.raises((ValueError, RuntimeError), match=r"step|state"):
        HiFT.wrap(base, model, config=HiFTConfig.paper())
    assert_same_tree(base.state_dict(), before)


def snapshot(model: nn.Module, hift: HiFT) -> tuple[Any, ...]:
    state = copy.deepcopy(hift.state_dict())
    return weights(model), state, hift.updates, hift.active_group, list(hift.held_lr), trainable(model)


def assert_untouched(model: nn.Module, hift: HiFT, before: tuple[Any, ...]) -> None:
    after = snapshot(model, hift)
    assert differing(after[0], before[0]) == []
    assert_same_tree(after[1], before[1])
    assert after[2:] == before[2:]


def started(
    optimizer_class: Any = torch.optim.AdamW, model: nn.Module | None = None, steps: int = 4, **config: Any
) -> tuple[nn.Module, HiFT]:
    model, hift = hift_over(
        model if model is not None else small_decoder(torch.bfloat16), optimizer_class, lr=1e-2, **config
    )
    train(model, hift, token_batches(steps), steps)
    return model, hift


def with_decay_groups() -> tuple[nn.Module, HiFT]:
    model = small_decoder(torch.bfloat16)
    hift = HiFT.wrap(
        grouped_optimizer(model, torch.optim.AdamW, decay_split(model), lr=1e-2), model, config=HiFTConfig.paper()
    )
    train(model, hift, token_batches(3), 3)
    return model, hift


def bare() -> tuple[nn.Module, Any]:
    model = small_decoder(torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


CHECKPOINTS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "another architecture": (lambda: started(model=tiny_gpt2(torch.bfloat16)), r"transformer\.wte|embed_tokens"),
    "more blocks": (lambda: started(model=small_decoder(torch.bfloat16, blocks=4)), r"layers\.3"),
    "another width": (lambda: started(model=small_decoder(torch.bfloat16, vocab=101)), r"embed_tokens.*(101|97)"),
    "another grouping": (lambda: started(layers_per_group=2), r"layers_per_group|group"),
    "another number of steps": (lambda: started(steps_per_group=2), "steps_per_group"),
    "another order": (lambda: started(order="top2down"), "order of turns"),
    "a random order": (lambda: started(order="random", seed=4), "order of turns"),
    "another class": (lambda: started(torch.optim.Adam), r"\bAdam\b.*AdamW|AdamW.*\bAdam\b"),
    "a class with other state": (lambda: started(torch.optim.SGD), "SGD"),
    "other parameter groups": (with_decay_groups, "param.groups"),
    "the bare optimizer": (bare, "HiFT|hift"),
}


@functools.cache
def undisturbed() -> dict[str, torch.Tensor]:
    """Train four updates and a cycle; nothing foreign was loaded."""
    model, hift = started()
    train(model, hift, token_batches(12), LAYERS, start=4)
    return weights(model)


@pytest.mark.parametrize("which", CHECKPOINTS)
def test_a_checkpoint_of_something_else_is_refused_and_nothing_is_altered(which: str) -> None:
    make, message = CHECKPOINTS[which]
    foreign = reloaded(make()[1].state_dict())
    model, hift = started()
    before = snapshot(model, hift)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        hift.load_state_dict(foreign)
    assert_untouched(model, hift, before)
    train(model, hift, token_batches(12), LAYERS, start=4)
    assert differing(weights(model), undisturbed()) == []


def test_a_state_of_the_older_defaults_is_told_their_preset_and_goes_on_with_it() -> None:
    model, hift = started()  # the paper's schedule, which was the default, in the first version of the saved form
    saved = reloaded(hift.state_dict())
    header = {key: value for key, value in saved["hift"].items() if not key.startswith("skipped")}
    older = {**saved, "hift": {**header, "version": 1}}
    default = HiFT(small_decoder(torch.bfloat16), torch.optim.AdamW, lr=1e-2)
    contexts: dict[str, Any] = {"HiFTConfig.paper()": nullcontext(), "--preset paper": naming_options()}
    for preset, context in contexts.items():
        with context, pytest.raises(ValueError, match="the saved state has another") as caught:
            default.load_state_dict(older)
        for part in ("another grouping (layers_per_group, layers): 5 groups", "another order of turns (order, seed)"):
            assert part in str(caught.value)
        assert "another steps_per_group: 1 there, 20 here" in str(caught.value)
        assert str(caught.value).endswith(f"with the settings of the saved run (its turns are those of {preset})")
    again_model, again = started(steps=0)
    again_model.load_state_dict(model.state_dict())
    again.load_state_dict(older)
    assert (again.updates, again.skipped_turns) == (4, {})
    for each, optimizer in ((model, hift), (again_model, again)):
        train(each, optimizer, token_batches(12), 8, start=4)
    assert_same_bits(model, again_model)


@pytest.mark.parametrize("config", [{"order": "top2down"}, {"order": "random"}, {"steps_per_group": 2}])
def test_a_state_of_another_schedule_than_the_papers_is_not_told_to_be_the_papers(config: dict[str, Any]) -> None:
    _, hift = started(steps=1, **config)
    default = HiFT(small_decoder(torch.bfloat16), torch.optim.AdamW, lr=1e-2)
    with pytest.raises(ValueError, match=r"with the settings of the saved run$"):
        default.load_state_dict(reloaded(hift.state_dict()))


NAME = "model.layers.0.mlp.up_proj.weight"


Damage = Callable[[dict[str, Any]], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "entry lost": (lambda saved: saved["state"].pop(NAME), re.escape(NAME)),
    "moment lost": (
        lambda saved: saved["state"][NAME].pop("exp_avg"),
        f"{re.escape(NAME)}.*exp_avg|exp_avg.*{re.escape(NAME)}",
    ),
    "master lost": (
        lambda saved: saved["state"][NAME].pop("master"),
        f"{re.escape(NAME)}.*master|master.*{re.escape(NAME)}",
    ),
    "wrong shape": (
        lambda saved: saved["state"][NAME].update(exp_avg_sq=saved["state"][NAME]["exp_avg_sq"][:-1]),
        re.escape(NAME),
    ),
    "wrong shape of a master": (
        lambda saved: saved["state"][NAME].update(master=saved["state"][NAME]["master"].t().contiguous()),
        re.escape(NAME),
    ),
    "parameter name unknown": (
        lambda saved: saved["state"].update({NAME.replace("up_proj", "sideways"): saved["state"][NAME]}),
        "sideways",
    ),
    "section lost": (lambda saved: saved.pop("hift"), "hift"),
    "parameter groups lost": (lambda saved: saved.pop("param_groups"), "param_groups"),
    "a parameter group too many": (
        lambda saved: saved["param_groups"].append(copy.deepcopy(saved["param_groups"][0])),
        "param.groups",
    ),
    "members of a parameter group lost": (lambda saved: saved["param_groups"][0].pop("params"), "params"),
    "no count of updates": (lambda saved: saved["hift"].update(updates=None), "updates"),
    "the count of updates lost": (lambda saved: saved["hift"].pop("updates"), "updates"),
    "moment without a value": (lambda saved: saved["state"][NAME].update(exp_avg=None), f"exp_avg.*{re.escape(NAME)}"),
    "negative squares": (
        lambda saved: saved["state"][NAME]["exp_avg_sq"][0].fill_(-1.0),
        f"exp_avg_sq.*{re.escape(NAME)} has negative values",
    ),
    "a negative beta": (lambda saved: saved["param_groups"][0].update(betas=(-5.0, 0.999)), "AdamW.*beta"),
    "no betas": (lambda saved: saved["param_groups"][0].update(betas=None), "AdamW does not take the hyperparameters"),
    "a negative epsilon": (lambda saved: saved["param_groups"][0].update(eps=-5.0), "AdamW.*epsilon"),
    "a decay without a value": (
        lambda saved: saved["param_groups"][0].update(weight_decay=None),
        "AdamW does not take",
    ),
    "a rate without a value": (lambda saved: saved["param_groups"][0].update(lr=None), "AdamW does not take"),
    "held learning rates of other parameter groups": (
        lambda saved: saved["hift"].update(held_lr=[1e-3, 1e-3]),
        "held_lr",
    ),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_altered(how: str) -> None:
    damage, message = DAMAGES[how]
    model, hift = started()
    saved = reloaded(hift.state_dict())
    damage(saved)
    before = snapshot(model, hift)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        hift.load_state_dict(saved)
    assert_untouched(model, hift, before)
    _, empty = started(steps=0)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        empty.load_state_dict(saved)
    assert empty.updates == 0 and empty.state_dict()["state"] == {}


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@rotated(name=["AdamW", "SGD", "torch Adafactor", "AdamW8bit"], stream_bytes=[4096, 134_217_728])
def test_a_full_disk_is_said_before_the_first_update_and_the_step_can_be_repeated(
    name: str, stream_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = token_batches(8)
    undisturbed, expected = hift_over(small_decoder(torch.bfloat16), name)
    disk = {"state": "disk", "state_dir": str(tmp_path), "stream_bytes": stream_bytes}
    model, hift = hift_over(small_decoder(torch.bfloat16), name, **disk)
    model(**batches[0]).loss.backward()
    before, gradients = weights(model), gradients_of(model)
    with full_disk(monkeypatch), pytest.raises(OSError, match=re.escape(str(tmp_path))) as error:
        hift.step()
    assert re.search(r"It needs \d[\d,]+ bytes, and .* had \d[\d,]+ free\.", str(error.value))
    assert list(tmp_path.iterdir()) == []
    assert differing(weights(model), before) == []
    assert (hift.updates, hift.active_group, hift.state_dict()["state"]) == (0, 0, {})
    assert differing(gradients_of(model), gradients) == []
    hift.step()
    assert hift.updates == 1
    train(model, hift, batches, 7, start=1)
    train(undisturbed, expected, batches, 8)
    assert_same_bits(model, undisturbed)


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file, not a folder")
    with pytest.raises(OSError, match=re.escape(str(blocked))):
        started(steps=1, state="disk", state_dir=str(blocked))


def test_files_of_one_run_are_not_shared_with_another_in_the_same_folder(tmp_path: Path) -> None:
    disk = {"state": "disk", "state_dir": str(tmp_path)}
    runs = [
        hift_over(small_decoder(torch.bfloat16, seed=seed), torch.optim.AdamW, lr=1e-2, **disk)  # type: ignore[arg-type]
        for seed in (0, 1)
    ]
    for update in range(10):
        for model, hift in runs:
            train(model, hift, token_batches(10), 1, start=update)
    for seed, (model, _) in enumerate(runs):
        other, alone = hift_over(small_decoder(torch.bfloat16, seed=seed), torch.optim.AdamW, lr=1e-2)
        train(other, alone, token_batches(10), 10)
        assert_same_bits(model, other)


@pytest.mark.parametrize("name", ["layers_per_group", "order", "state", "max_grad_norm"])
def test_a_setting_of_hift_among_the_optimizers_arguments_is_named_with_its_place(name: str) -> None:
    message = rf"^{name}= is a setting of HiFT, and no argument of AdamW\. Pass config=HiFTConfig\({name}=\.\.\.\)$"
    with pytest.raises(TypeError, match=message):
        HiFT(small_decoder(), torch.optim.AdamW, lr=1e-3, **{name: 1})


def test_a_failed_construction_leaves_the_model_as_it_was() -> None:
    model = small_decoder()
    before = weights(model)
    with pytest.raises(TypeError, match="no_such_option"):
        HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-3, no_such_option=True)
    with pytest.raises(ValueError, match="learning rate"):
        HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=-1.0)
    assert trainable(model) == set(before)
    assert all(torch.equal(bits(value), bits(before[name])) for name, value in weights(model).items())
