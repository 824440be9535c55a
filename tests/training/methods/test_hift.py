import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from slivertune import HiFTConfig
from slivertune.core.setting_checks import layers_or_auto
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.methods.hift import HiFTMethod
from slivertune.training.methods.method import SliverMethod
from slivertune.training.methods.sft import SFTMethod
from slivertune.training.options.methods import HiFTOptions, SFTOptions
from tests.conftest import CHECKOUT
from tests.helpers.models import LAYERS, differing, tiny_llama
from tests.helpers.ranks import quick
from tests.training.test_callbacks import make_trainer
from tests.training.tiny_runs import UNMEASURED, Runs, assert_same_bits, saved_weights

PAPER: dict[str, Any] = {"layers_per_group": 1, "steps_per_group": 1, "order": "bottom2up"}


def attached(folder: Path, **settings: Any) -> HiFTMethod:
    method = HiFTMethod(HiFTOptions(**{**PAPER, **settings}))
    method.attach(make_trainer(folder))
    return method


def test_a_rate_that_nobody_chose_for_hift_is_pointed_at(tmp_path: Path) -> None:
    method = attached(tmp_path)
    (note,) = method.notes(tiny_llama(), learning_rate=5e-5)
    assert note.startswith(f"HiFT trains each parameter in one of {LAYERS} updates here")
    assert "--learning_rate was not given, so 5e-05 is used" in note
    assert method.notes(tiny_llama(), learning_rate=None) == []
    assert attached(tmp_path, layers_per_group=LAYERS).notes(tiny_llama(), learning_rate=5e-5) == []


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_the_embedded_defaults_are_the_best_of_the_committed_search(
    m: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    part = json.loads((CHECKOUT / "benchmarks" / "results" / "dial.json").read_text(encoding="utf-8"))["language"]
    losses: dict[float, list[float]] = {}
    for run in part["runs"]:
        if run["layers_per_group"] == m and not run["diverged"]:
            losses.setdefault(run["learning_rate"], []).append(run["loss"])
    means = {rate: sum(values) / 3 for rate, values in losses.items() if len(values) == 3}
    training = parse_train_arguments(
        ["--dataset", "builtin:python-reference", "--layers_per_group", str(m), "--steps_per_group", "1"]
    ).training
    assert training.learning_rate == min(means, key=means.__getitem__)
    # Lines of the memory ledger come every eight updates, and the last should be whole.
    assert training.max_steps == part["calibration"]["num_updates"][str(m)] // 8 * 8


@pytest.mark.parametrize("m", [1, 2, 4])
def test_with_the_default_turns_the_embedded_rate_is_the_best_of_the_committed_search(
    m: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = json.loads((CHECKOUT / "benchmarks" / "results" / "quality.json").read_text(encoding="utf-8"))
    (row,) = (each for each in results["language"] if each["name"] == f"hift-{m}-stays")
    rate = parse_train_arguments(["--layers_per_group", str(m)]).training.learning_rate
    assert {run["rate"] for run in row["runs"]} == {rate}


def test_the_paper_is_a_preset_of_which_each_setting_can_be_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["--preset", "paper", "--order", "top2down"]
    assert parse_train_arguments([]).method.options.config(0) == HiFTConfig(layers_per_group=4)
    model = ["--model", "./x", "--dataset", "y.jsonl"]
    assert parse_train_arguments(model).method.options.config(0) == HiFTConfig()
    assert parse_train_arguments([*model, *typed]).method.options.config(0) == HiFTConfig.paper(order="top2down")
    with pytest.raises(ValueError, match="--preset"):
        parse_train_arguments(["--method", "dense", *typed])
    # A typed preset wins over a run file, whose own one does not win over its other values.
    Path("run.yaml").write_text("model_name_or_path: ./x\ndataset: y.jsonl\nsteps_per_group: 5\n", encoding="utf-8")
    file = ["run.yaml"]
    assert parse_train_arguments([*file, *typed]).method.options.config(0) == HiFTConfig.paper(order="top2down")
    with Path("run.yaml").open("a", encoding="utf-8") as more:
        more.write("preset: paper\n")
    assert parse_train_arguments(file).method.options.config(0) == HiFTConfig.paper(steps_per_group=5)


@pytest.mark.parametrize(
    ("text", "number"),
    [("3", 3), ("0.25", 0.25), (".5", 0.5), ("1e-05", 1e-5), ("5E-1", 0.5), ("all", "all"), ("auto", "auto")],
)
def test_layers_per_group_is_a_number_a_share_or_auto(text: str, number: object) -> None:
    assert layers_or_auto(text) == number


@pytest.mark.parametrize("text", ["0", "-1", "1.0", "0.0", "25%", "nan", "many", "", "1e5"])
def test_other_words_for_layers_per_group_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^(layers_per_group=|'{text}').*must be "):
        HiFTConfig(layers_per_group=layers_or_auto(text))


@pytest.mark.parametrize(
    ("typed", "followed"),
    [
        ({}, (1, 1, "bottom2up")),
        ({"layers_per_group": "auto"}, (1, 1, "bottom2up")),
        ({"layers_per_group": 2, "order": "random"}, (2, 1, "random")),
    ],
)
def test_a_run_from_before_goes_on_with_the_schedule_that_it_began_with(
    typed: dict[str, Any], followed: tuple[int, int, str]
) -> None:
    method = HiFTMethod(HiFTOptions(**typed))
    method.follow({"hift": {"layers_per_group": 1, "steps_per_group": 1, "order": "bottom2up"}}, frozenset(typed))
    options = method.options
    assert (options.layers_per_group, options.steps_per_group, options.order) == followed


def test_a_number_of_layers_that_was_not_searched_has_the_rate_of_the_next_smaller_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for m, like in (("3", "2"), ("7", "4"), ("20", "8")):
        mine, other = (parse_train_arguments(["--layers_per_group", each]) for each in (m, like))
        assert mine.method.options.layers_per_group == int(m)
        assert mine.training.learning_rate == other.training.learning_rate
        assert mine.training.max_steps == other.training.max_steps
    with pytest.raises(ValueError, match="layers_per_group=0 must be"):
        parse_train_arguments(["--layers_per_group", "0"])


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        ({}, 2 * LAYERS + 1),
        ({"steps_per_group": 2}, 2 * LAYERS + 2),
        ({"layers_per_group": 2}, 10),
        ({"layers_per_group": LAYERS}, 8),
        ({"steps_per_group": 20}, 20),
    ],
)
def test_lines_are_eight_updates_or_more_apart_and_show_one_group_after_the_other(
    settings: dict[str, Any], updates: int, tmp_path: Path
) -> None:
    method = attached(tmp_path, **settings)
    assert method.logging_steps() == updates
    num_groups, turn = method.optimizer.num_groups, settings.get("steps_per_group", 1)
    shown = [(line * updates - 1) // turn % num_groups for line in range(1, 2 * num_groups + 1)]
    assert shown == [*range(num_groups)] * 2


@pytest.mark.parametrize("method", [HiFTMethod(HiFTOptions()), SFTMethod(SFTOptions())])
def test_it_says_so_when_it_is_asked_before_it_is_attached(method: SliverMethod) -> None:
    with pytest.raises(RuntimeError, match=rf"{method.name} is not attached to a Trainer\. Call attach first"):
        method.lines()


@pytest.mark.parametrize("waiting", quick(["int8", "nf4"], ["int8"]))
def test_waiting_layers_in_fewer_bits_resume_with_the_same_bits_and_save_exact_weights(
    waiting: str, runs: Runs
) -> None:
    more = (
        "--max_length",
        "32",
        "--save_steps",
        "3",
        "--weights_dtype",
        "bf16",
        "--use_cpu",
        *UNMEASURED,
        "--waiting",
        waiting,
    )
    result = runs.train("whole", *more)
    assert f"  layers  idle ones in {waiting}, also in evaluation; saved weights are exact" in runs.printed()
    assert result["settings"]["waiting"] == waiting
    runs.train("resumed", *more, "--resume_from_checkpoint", str(runs["whole/checkpoint-3"]))
    assert_same_bits(runs["resumed"], runs["whole"])
    exact = runs.train("exact", *more[:-2])
    saved, other = (saved_weights(runs[each] / "model") for each in ("whole", "exact"))
    assert saved.keys() == other.keys() and all(each.isfinite().all() for each in saved.values())
    assert differing(saved, other) != [], "the gradients went through other layers"
    assert result["after"] != exact["after"]


def test_everything_that_saves_memory_goes_together_and_blocks_are_never_moved_as_a_whole(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (
        *("--max_length", "32", "--save_steps", "3", "--weights_dtype", "bf16", "--use_cpu", "--waiting", "nf4"),
        *("--gradient_checkpointing", "true", "--token_tile_size", "16", *UNMEASURED),
    )
    runs.train("device", *more)
    lies: set[tuple[bool, str]] = set()

    def stop(self: Trainer, model: Any, device: Any) -> None:
        model.to("meta")  # in the device's place
        lies.update((".layers." in name, each.device.type) for name, each in model.named_parameters())
        raise RuntimeError("seen enough")

    host = ("--weights", "host", "--gradients", "host", "--state", "disk", "--offload_activations", "true")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_move_model_to_device", stop)
        with pytest.raises(AssertionError):  # it did not return 0
            runs.train("stopped", *more, *host, "--state_dir", str(runs["stopped state"]))
    assert lies == {(True, "cpu"), (False, "meta")}
    runs.train("host", *more, *host, "--state_dir", str(runs["state"]))
    assert_same_bits(runs["host"], runs["device"])
    resumed = ("--resume_from_checkpoint", str(runs["host"] / "checkpoint-3"))
    runs.train("resumed", *more, *host, "--state_dir", str(runs["again"]), *resumed)
    assert_same_bits(runs["resumed"], runs["device"])


def test_waiting_layers_do_not_go_with_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for option, value in (("--waiting", "int8"), ("--weights", "host")):
        with pytest.raises(ValueError, match=f"{option} {value} does not go with --torch_compile"):
            parse_train_arguments([option, value, "--torch_compile", "true"])
    with pytest.raises(ValueError, match=r'state="device" offloads none'):
        parse_train_arguments(["--waiting", "int8", "--state", "device"])
