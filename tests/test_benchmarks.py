"""Each benchmark starts, with tiny sizes, and writes a result that can be read; the times in it mean nothing here."""

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from slivertune.training.embedded.base_model import (
    BASE_RECIPE,
    BaseRecipe,
    base_model_folder,
    save_base_model,
    train_base_model,
)
from tests.conftest import CHECKOUT
from tests.helpers.launching import run_python
from tests.pretended_cuda.on_device import require_device

pytestmark = pytest.mark.slow

BENCHMARKS = CHECKOUT / "benchmarks"
RESULTS = BENCHMARKS / "results"
TINY_GPU = ["--blocks=2", "--hidden=64", "--heads=4", "--vocabulary=128", "--length=16", "--probe_bytes=65536"]


def run(
    script: str, output: Path | None, *options: str, name: str = "--output", expect: int = 0, **variables: str
) -> Any:
    """What a benchmark writes, or says as errors, started as the README says; the kept results must be as before."""
    kept = {path.name: path.read_bytes() for path in RESULTS.glob("*")}
    into = () if output is None else (name, output)
    done = run_python(BENCHMARKS / script, *options, *into, cwd=CHECKOUT, expect=expect, **variables)
    assert {path.name: path.read_bytes() for path in RESULTS.glob("*")} == kept
    return done.stderr if expect else read(output)


def read(path: Any) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def assert_names_the_machine(environment: dict[str, Any]) -> None:
    assert environment["processor"] and environment["num_threads"] >= 1
    assert environment["versions"]["torch"] == torch.__version__
    assert str(Path.home()) not in json.dumps(environment)


def test_overhead_writes_times_and_their_ratios(tmp_path: Path) -> None:
    result = run("overhead.py", tmp_path / "overhead.json", "--quick")
    for part in ("wrapper", "cycle"):
        assert_names_the_machine(result[part]["environment"])
        assert result[part]["environment"]["num_threads"] == 1

    wrapper = result["wrapper"]
    assert {name: len(series) for name, series in wrapper["seconds"].items()} == dict.fromkeys(
        ("bare", "wrapped", "streamed"), 2
    )
    assert wrapper["same_weights_as_bare"] == {"wrapped": True, "streamed": True}
    ratios = [
        one["cpu"] / other["cpu"]
        for one, other in zip(wrapper["seconds"]["wrapped"], wrapper["seconds"]["bare"], strict=True)
    ]
    assert wrapper["median_ratio_to_bare"]["wrapped"]["cpu"] == pytest.approx(sum(ratios) / 2)
    assert wrapper["within_limit"] == (wrapper["median_ratio_to_bare"]["wrapped"]["cpu"] <= 1.02)

    cycle = result["cycle"]
    (times,) = cycle["seconds"]
    assert cycle["num_groups"] == len(times["hift"]) == 4 and len(times["dense"]) == 2
    ratio = sum(one["cpu"] for one in times["hift"]) / 2 / sum(one["cpu"] for one in times["dense"])
    assert cycle["median_ratio"]["cpu"] == pytest.approx(ratio)
    assert cycle["within_limit"] == (ratio <= 0.55)


def test_parts_that_are_not_run_stay_in_the_result(tmp_path: Path) -> None:
    output = tmp_path / "overhead.json"
    output.write_text('{"wrapper": {"kept": true}}')
    result = run("overhead.py", output, "--quick", "--parts", "cycle")
    assert result["wrapper"] == {"kept": True} and result["cycle"]["num_groups"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["overhead.json"]


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("overhead.py", "--quick"),
        ("gpu.py", "--device=cpu"),
        ("tokentune.py", "--quick"),
        ("sft.py", "--quick"),
        ("curve_measured.py", "--device=cpu"),
        ("gpu_features.py", "--device=cpu"),
    ],
)
def test_a_trial_is_never_written_among_the_results(script: str, option: str) -> None:
    assert "needs --output" in run(script, None, option, expect=2)


def test_tokentune_writes_times_and_bytes_of_every_variant(tmp_path: Path) -> None:
    result = run("tokentune.py", tmp_path / "tokentune.json", "--quick", "--rounds=1")
    assert_names_the_machine(result["environment"])
    dense = result["variants"]["dense"]
    for name, one in result["variants"].items():
        (seconds,), (dense_seconds,) = one["seconds"], dense["seconds"]
        assert one["median_ratio"]["cpu"] == pytest.approx(seconds["cpu"] / dense_seconds["cpu"]), name
    saved = [result["variants"][name]["saved_bytes"] for name in ("dense", "50%", "30%", "20%", "10%")]
    assert saved == sorted(saved, reverse=True) and saved[-1] < saved[0] / 2
    assert result["variants"]["30%_checkpoint_mlp"]["saved_bytes"] < result["variants"]["30%"]["saved_bytes"]
    assert result["variants"]["30%"]["peak_activation_bytes"] < dense["peak_activation_bytes"]


def test_sft_writes_times_and_bytes_beside_loras(tmp_path: Path) -> None:
    result = run("sft.py", tmp_path / "sft.json", "--quick")
    assert_names_the_machine(result["environment"])
    for part in ("plain", "checkpointing"):
        times, peaks = result[part]["times"], result[part]["peaks"]
        assert list(times["variants"]) == ["dense", "lora", "sft_ag", "sft_ma"]
        assert times["num_trained"]["sft"] == times["num_trained"]["lora"]
        ag = times["variants"]["sft_ag"]
        plain = sorted(ag["seconds"][:15])[7]
        assert ag["plain_seconds"] == pytest.approx(plain)
        assert ag["reselection_share"] == pytest.approx(
            sum(seconds - plain for seconds in ag["seconds"][15:]) / (20 * plain)
        )
        assert times["variants"]["lora"]["plain_ratio_to_lora"] == 1.0
        num_trained = times["num_trained"]["sft"]
        assert peaks["lora"]["plain"]["state"] >= 8 * num_trained, "two fp32 moments"
        assert peaks["sft_ag"]["plain"]["state"] >= 20 * num_trained
        assert peaks["sft_ag"]["estimating"]["state"] >= 36 * num_trained
        assert peaks["sft_ag_packed"]["plain"]["state"] < 12 * num_trained
        met = result[part]["targets_met"]
        assert met["sft_ag_time"] == (ag["plain_ratio_to_lora"] <= 1.15)
        assert met["sft_ag_peak"] == (peaks["sft_ag"]["plain"]["peak_bytes"] <= peaks["lora"]["plain"]["peak_bytes"])
        chunked = result[part]["chunked_peaks"]
        assert chunked["sft_ag"]["plain"]["state"] == peaks["sft_ag"]["plain"]["state"]
        assert met["sft_ag_chunked_peak_while_estimating"] == (
            chunked["sft_ag"]["estimating"]["peak_bytes"] <= chunked["lora"]["plain"]["peak_bytes"]
        )


def test_ranks_writes_bytes_beside_the_dense_ones(tmp_path: Path) -> None:
    result = run("ranks.py", tmp_path / "ranks.json", "--quick", "--layouts", "ddp")
    assert_names_the_machine(result["environment"])
    methods = result["layouts"]["ddp"]
    num_parameters = methods["dense"]["num_parameters"]
    # In a ring of two, an all-reduce sends as many bytes as it reduces: each fp32 gradient once.
    assert methods["dense"]["bytes_per_step"] == pytest.approx(4 * num_parameters, rel=0.01)
    groups = 4
    assert methods["hift"]["bytes_per_step"] == pytest.approx(4 * num_parameters / groups, rel=0.05)
    for name in ("sft_ag", "sft_ma"):
        assert 4 * methods[name]["num_trained"] < methods[name]["bytes_per_step"] < methods["hift"]["bytes_per_step"]
    assert result["switches_within_limit"] == (
        methods["hift"]["switch"]["beyond_copies"] <= result["switch_limit_seconds"]
    )


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("gpu.py", ["--device=cuda"]),
        ("tokentune.py", ["--device=cuda"]),
        ("gpu.py", []),
        ("curve_measured.py", []),
        ("gpu_features.py", []),
    ],
)
def test_a_gpu_that_is_not_there_is_named_and_nothing_written(script: str, options: list[str], tmp_path: Path) -> None:
    assert "needs a CUDA device" in run(script, tmp_path / "x.json", *options, expect=2, CUDA_VISIBLE_DEVICES="")
    assert list(tmp_path.iterdir()) == []


def check_gpu_result(result: dict[str, Any]) -> None:
    assert_names_the_machine(result["environment"])
    assert result["num_parameters"] == result["weights_bytes"] // 2
    assert [one["kind"] for one in result["resident_cycle"]] == ["embedding", "block", "head"]
    first, counted = result["cycles"]
    assert [one["kind"] for one in first] == [one["kind"] for one in counted] == ["embedding", "block", "block", "head"]
    summary = result["summary"]
    assert summary["mean_step_ms"] == pytest.approx(sum(one["step_ms"] for one in counted) / 4)
    assert summary["mean_waits_ms"] == pytest.approx(sum(one["waits_ms"] for one in counted) / 4)
    for values in summary["by_kind"].values():
        assert values["beyond_resident_ms"] == pytest.approx(values["step_ms"] - values["resident_step_ms"])
    assert len(result["dense"]["forward_backward_ms"]) == 5
    assert summary["ratio_to_dense_forward_backward"] == pytest.approx(
        summary["mean_ms"] / result["dense"]["median_ms"]
    )


def test_gpu_runs_dry_on_a_cpu_and_says_so(tmp_path: Path) -> None:
    result = run("gpu.py", tmp_path / "gpu.json", "--device=cpu", "--resident_blocks=1", *TINY_GPU)
    check_gpu_result(result)
    assert result["dry_run"] is True and result["device"] == "cpu"
    # What only a device can tell is left out, not made up.
    assert result["summary"]["peak_bytes"] is None and result["dense"]["peak_bytes"] is None
    assert result["summary"]["mean_waits_ms"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_measures_memory_and_time_of_every_group(tmp_path: Path) -> None:
    result = run("gpu.py", tmp_path / "gpu.json", "--resident_blocks=1", *TINY_GPU)
    check_gpu_result(result)
    assert result["dry_run"] is False and result["device"] == torch.cuda.get_device_name(0)
    assert all(one["peak_bytes"] > one["left_bytes"] > 0 for one in result["cycles"][1])
    assert all(0 <= one["waits_ms"] < one["step_ms"] for one in result["cycles"][1])


def test_features_run_dry_and_keep_the_bits_that_they_promise(tmp_path: Path) -> None:
    ways = ("device", "host", "SGD", "full", "activations kept")
    result = run("gpu_features.py", tmp_path / "features.json", "--device=cpu", "--quick", "--ways", *ways)
    assert_names_the_machine(result["environment"])
    rows = result["rows"]
    assert (result["dry_run"], tuple(rows)) == (True, ways)
    assert [rows[name].get("same_bits") for name in ways] == [None, True, None, None, None]
    assert "needs a CUDA device, whose free memory can be read" in rows.pop("activations kept")["failure"]
    assert all(row["updates"] == 6 and row["peak_bytes"] is None for row in rows.values())


def test_the_measured_curve_runs_dry_and_goes_on_where_it_was(tmp_path: Path) -> None:
    dry = ("--device=cpu", "--quick", "--updates=1", "--tokens", "4096", "--ways")
    run("curve_measured.py", tmp_path / "curve.json", *dry, "m2", "torchao", "zero2")
    result = run("curve_measured.py", tmp_path / "curve.json", *dry, "m2", "sft", "qlora", "zero3")
    assert_names_the_machine(result["environment"])
    assert (result["dry_run"], result["device"]) == (True, "cpu")
    points = {each["way"]: each for each in result["points"]}
    assert list(points) == ["m2", "sft", "qlora", "torchao", "zero2", "zero3"]
    assert points.pop("torchao")["failure"] == "needs a CUDA device"
    for each in points.values():
        assert each["batch_size"] * each["micro_batches"] == 2  # of 2,048 tokens
        assert each["seconds_per_update"] * each["tokens_per_second"] == pytest.approx(4096)
        assert each["peak_bytes"] is None, "what only a device can tell is left out, not made up"
    assert {name: each["updates"] for name, each in points.items()} == {
        "m2": 3,
        "sft": 20,
        "qlora": 1,
        "zero2": 1,
        "zero3": 1,
    }


def test_of_the_measured_curves_micro_batches_the_fastest_counts_and_what_stopped_them_is_told() -> None:
    code = """
import argparse, json, curve_measured
trials = {1: {"fits": True, "seconds_per_update": 3.0}, 2: {"fits": True, "seconds_per_update": 2.0}}
trials |= {4: {"fits": True, "seconds_per_update": 2.5}, 8: {"fits": False, "failure": "a fault"}}
curve_measured._run_trial = lambda way, tokens, size, arguments: trials[size]
print(json.dumps(curve_measured.measure_point("m1", 32768, argparse.Namespace(device="cuda"))))
"""
    point = json.loads(run_python("-c", code, cwd=BENCHMARKS).stdout)
    assert point == {
        "way": "m1",
        "tokens": 32768,
        "fits": True,
        "seconds_per_update": 2.0,
        "stopped_at": 8,
        "failure": "a fault",
    }


def test_gpu_refuses_a_model_that_the_host_cannot_hold(tmp_path: Path) -> None:
    options = ("--device=cpu", *TINY_GPU, "--vocabulary=1000000000000")
    said = run("gpu.py", tmp_path / "gpu.json", *options, expect=1)
    assert "GB of host memory" in said and "lower --blocks" in said
    assert list(tmp_path.iterdir()) == []


def make_tiny_embedded(cache: Path, num_layers: int = 6) -> Any:
    """A tiny model in the place of the embedded one, for what runs with that cache."""
    folder = base_model_folder(BASE_RECIPE, cache / "slivertune" / "base_models")
    tiny = BaseRecipe(
        hidden_size=16, intermediate_size=16, num_layers=num_layers, num_heads=2, num_steps=1, corpus_bytes=2_000
    )
    model = train_base_model(tiny, ["def f(): pass\n" * 200], lambda step, loss: None)
    save_base_model(model, tiny, folder)
    return model


ROWS = """
seeds: [0]
options: --max_grad_norm 1.0
tasks:
  language:
    updates: 2
    rates: {dense: 2.0e-3}
rows:
  dense: --method dense
  hift-4: --method hift --layers_per_group 4
  hift-4-x2: --method hift --layers_per_group 4
  hift-99: --method hift --layers_per_group 99
"""


def evidence_words(cache: Path, *words: str) -> list[str]:
    make_tiny_embedded(cache)
    (cache / "rows.yaml").write_text(ROWS, encoding="utf-8")
    return ["language", *words, "--file", str(cache / "rows.yaml"), "--folder", str(cache / "runs")]


def evidence(cache: Path, *words: str) -> Any:
    """The rows of the tiny model, by name."""
    options = evidence_words(cache, *words)
    content = run("evidence.py", cache / "quality.json", *options, name="--results", XDG_CACHE_HOME=str(cache))
    assert str(cache) not in json.dumps(content)
    return {row["name"]: row for row in content["language"]}


def test_a_row_searches_a_rate_and_adds_seeds_at_it_and_runs_again_when_asked(tmp_path: Path) -> None:
    row = evidence(tmp_path, "--rows", "hift-4", "--seeds", "0")["hift-4"]
    assert_names_the_machine(row["environment"])
    assert row["options"] == "--method hift --layers_per_group 4" and row["failure"] is None
    (first,) = row["runs"]
    losses = {float(rate): after["eval_loss"] for rate, after in row["searched"].items()}
    assert losses[first["rate"]] == min(losses.values()) == first["after"]["eval_loss"]
    assert row["is_at_edge"] == (first["rate"] in (min(losses), max(losses))) and 3 <= len(losses) <= 7

    wider = evidence(tmp_path, "--rows", "hift-4", "--seeds", "0", "1")["hift-4"]
    assert wider["searched"] == row["searched"] and wider["runs"][0] == first, "its seconds, too, are of the first time"
    assert [(run["seed"], run["rate"]) for run in wider["runs"]] == [(0, first["rate"]), (1, first["rate"])]

    (again,) = evidence(tmp_path, "--rows", "hift-4", "--again", "--seeds", "0")["hift-4"]["runs"]
    assert again["after"] == first["after"] and again["seconds"] != first["seconds"]


STOPPED = """
import runpy, signal, sys
from slivertune.training.comparison.record import Record

write = Record.write

def write_and_stop(record):
    write(record)
    if record.folder.name == "hift-4-x2" and record.values["runs"]:
        signal.raise_signal(signal.SIGINT)

Record.write = write_and_stop
sys.path[0], *sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script, and stops it by Ctrl-C when a row has its first run."""


def test_rows_that_were_stopped_go_on_where_they_were(tmp_path: Path) -> None:
    words = evidence_words(tmp_path, "--rows", "dense", "hift-4-x2", "--results", str(tmp_path / "quality.json"))
    record = tmp_path / "runs" / "language" / "hift-4-x2" / "compare.json"
    command = [sys.executable, "-c", STOPPED, BENCHMARKS, BENCHMARKS / "evidence.py", *words]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    assert subprocess.run(command, cwd=CHECKOUT, env=environment, timeout=250, check=False).returncode != 0
    stopped = read(tmp_path / "quality.json")["language"]
    assert [row["name"] for row in stopped] == ["dense"]
    before = json.loads(record.read_text(encoding="utf-8"))["runs"]
    assert len(before) == 1

    rows = evidence(tmp_path, "--rows", "dense", "hift-4-x2")
    assert list(rows) == ["dense", "hift-4-x2"] and rows["dense"] == stopped[0]
    assert rows["dense"]["searched"].keys() >= {"0.001", "0.002", "0.004"}, "around the rate of the file"
    after = json.loads(record.read_text(encoding="utf-8"))["runs"]
    assert before.items() <= after.items() and len(after) > 1
    assert {run["num_updates"] for row in rows.values() for run in row["runs"]} == {2, 4}


def test_rows_that_are_there_stay_without_the_folder_of_runs(tmp_path: Path) -> None:
    run_of = {"after": {"eval_loss": 1.0}, "rate": 1.0, "seconds": 1.0, "peak_bytes": {"device": 1}}
    kept = [
        {"name": name, "failure": failure, "is_at_edge": False, "runs": [{**run_of, "seed": 0}][: failure is None]}
        for name, failure in (("lisa", None), ("dense", None), ("hift-99", "refused"))
    ]
    (tmp_path / "quality.json").write_text(json.dumps({"language": kept}), encoding="utf-8")
    assert list(evidence(tmp_path, "--rows", "dense", "hift-99").values()) == kept and not (tmp_path / "runs").exists()
    rows = evidence(tmp_path, "--rows", "hift-4")
    assert list(rows.values())[:3] == kept and list(rows)[3:] == ["hift-4"]


def test_a_row_keeps_why_it_was_refused(tmp_path: Path) -> None:
    row = evidence(tmp_path, "--rows", "hift-99")["hift-99"]
    assert row["runs"] == [] and "layers_per_group=99 must be in [1, 8]" in row["failure"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["retrieval"], "has no task 'retrieval' that is run here; name one of language, sst2"),
        (["language", "--rows", "lisa"], "has no rows lisa; it has dense, dense-8bit"),
        (["sst2", "--rows", "dense"], "sst2 needs --data FOLDER"),
        (["language", "--file", "other.yaml"], "rows of another --file are a trial, which needs --results"),
    ],
)
def test_rows_that_can_not_be_run_are_named_before_anything_is(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(ROWS, encoding="utf-8")
    done = run_python(BENCHMARKS / "evidence.py", *words, cwd=tmp_path, expect=2)
    assert said in " ".join(done.stderr.split()) and not (tmp_path / "runs").exists()


def test_same_bits_names_the_cells_in_which_two_commits_differ(tmp_path: Path) -> None:
    clone, output = tmp_path / "clone", tmp_path / "same_bits.json"

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-c", "user.name=test", "-c", "user.email=test@example.com", *arguments],
            cwd=clone,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(CHECKOUT), str(clone)], check=True)
    # The scripts as they are here, committed or not.
    shutil.copytree(BENCHMARKS, clone / "benchmarks", dirs_exist_ok=True)
    config = clone / "integrations" / "slivertune" / "hift" / "config.py"
    before = config.read_text(encoding="utf-8")
    config.write_text(before.replace('"order": "bottom2up"', '"order": "top2down"'), "utf-8")
    git("commit", "--quiet", "--all", "--message", "another order of the paper")
    done = run_python(
        *(clone / "benchmarks" / "same_bits.py", "HEAD~1", "HEAD", "--output", output),
        *("--layouts", "single", "--methods", "hift", "hift_random", "hift_int8", "sft", "lora_4bit"),
        cwd=tmp_path,
        expect=1,
    )
    assert "3 of 5 cells have the same bits" in done.stdout and "different: single hift\n" in done.stdout
    result = read(output)
    assert_names_the_machine(result["environment"])
    assert result["different"] == ["single hift", "single hift_int8"] and result["refused"] == []
    assert [result["old"], result["new"]] == [git("rev-parse", "HEAD~1"), git("rev-parse", "HEAD")]
    assert git("worktree", "list").count("\n") == 0


@pytest.mark.parametrize("part", [1, 2, 3])
def test_the_campaign_runs_whole_on_a_pretended_card_and_goes_on(part: int, tmp_path: Path) -> None:
    require_device()
    make_tiny_embedded(tmp_path / "cache")
    folder, variables = tmp_path / "results", {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    script = BENCHMARKS / "gpu.py"
    command = ["campaign", f"--part={part}", "--pretend", "--output", folder]
    kept = {path.name for path in RESULTS.rglob("*")}
    run_python(script, *command, cwd=CHECKOUT, expect=0, **variables)
    result = read(folder / f"part{part}.json")
    assert result["pretended"] and result["environment"]["versions"]["torch"] == torch.__version__
    assert {name: step["status"] for name, step in result["steps"].items()} == dict.fromkeys(result["steps"], 0)
    assert result["steps"] and (folder / f"part{part}.log").stat().st_size > 100
    assert [path.name for path in folder.glob("*.gz")] == (["optimizers-host.trace.json.gz"] if part == 2 else [])

    name = next(iter(result["steps"]))
    result["steps"][name]["status"] = None
    (folder / f"part{part}.json").write_text(json.dumps(result))
    again = run_python(script, *command, cwd=CHECKOUT, expect=0, **variables)
    assert again.stdout.count("done before") == len(result["steps"]) - 1
    assert read(folder / f"part{part}.json")["steps"][name]["status"] == 0
    assert {path.name for path in RESULTS.rglob("*")} == kept


def test_a_step_of_the_campaign_whose_time_is_over_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    campaign = import_module("gpu_campaign")
    sleeps = campaign.Step(command=["-c", "print('begins', flush=True); import time; time.sleep(600)"], seconds=2)
    quick = campaign.Step(command=["-c", "print('ends')"], seconds=60)
    monkeypatch.setattr(campaign, "PARTS", {1: {"sleeps": sleeps, "quick": quick}})
    steps = campaign.run_part(1, tmp_path, pretend=False)["steps"]
    assert steps["sleeps"]["status"] is None and steps["sleeps"]["last lines"][-1] == "begins"
    assert steps["quick"]["status"] == 0 and steps["quick"]["last lines"][-1] == "ends"
    monkeypatch.setattr(campaign, "SECONDS", 5)
    again = campaign.main(["--part", "1", "--output", str(tmp_path)])
    assert again == 1 and read(tmp_path / "part1.json")["steps"]["quick"] == steps["quick"]
