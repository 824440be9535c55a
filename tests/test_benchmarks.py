"""Each benchmark starts, with tiny sizes, and writes a result that can be read; the times in it mean nothing here."""

import json
import shutil
import subprocess
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


def test_plan_time_writes_planned_and_measured_seconds(tmp_path: Path) -> None:
    result = run("plan_time.py", tmp_path / "plan_time.json", "--quick")
    assert_names_the_machine(result["environment"])
    dense, *others = result["rows"]
    assert abs(dense["error"]) < 1e-6 and dense["is_met"] is None, "it is what calibrates"
    assert [row["settings"]["method"] for row in others] == ["hift", "hift", "sft", "lora", "dense"]
    for row in others:
        planned, measured = sum(row["planned_seconds"].values()), sum(row["measured_seconds"].values())
        assert row["error"] == pytest.approx(planned / measured - 1)
        assert row["is_met"] == (abs(row["error"]) <= result["target"])


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("overhead.py", "--quick"),
        ("gpu.py", "--device=cpu"),
        ("tokentune.py", "--quick"),
        ("sft.py", "--quick"),
        ("schedule.py", "--quick"),
        ("host_weights.py", "--quick"),
        ("curve.py", "--quick"),
        ("curve_measured.py", "--device=cpu"),
        ("plan_time.py", "--quick"),
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


def test_schedule_writes_what_is_exposed_with_room_and_without(tmp_path: Path) -> None:
    name = "m = 1, 512 tokens"
    result = run("schedule.py", tmp_path / "schedule.json", "--quick", "--rows", name)
    assert_names_the_machine(result["environment"])
    (row,) = result["rows"]
    assert row["name"] == name and row["fits"]
    assert row["budget_bytes"] == 24 * 2**30 - row["peak_bytes"] - row["allowance_bytes"]
    for variant in ("prefetched", "before"):
        for duplex in ("full", "half"):
            one = row[variant][duplex]
            assert [group["layers"] for group in one["groups"]][::3] == ["embedding", "head"]
            exposed = sum(group["exposed_seconds"] for group in one["groups"])
            assert one["exposed_share"] == pytest.approx(exposed / sum(group["seconds"] for group in one["groups"]))
            assert sum(one["exposed_by"].values()) == pytest.approx(one["exposed_seconds"])
    assert row["prefetched"]["full"]["exposed_share"] < row["before"]["full"]["exposed_share"]
    assert row["is_met"] == (row["prefetched"]["full"]["exposed_share"] <= row["target"])


CURVE = ("--quick", "--cards", "4090", "--tokens", "1024")


def test_curve_plans_a_point_as_the_command_line_does(tmp_path: Path) -> None:
    result = run("curve.py", tmp_path / "curve.json", *CURVE, "--settings", "m2")
    assert_names_the_machine(result["environment"])
    (point,) = result["points"]
    assert (point["card"], point["setting"], point["tokens"], point["fits"]) == ("4090", "m2", 1024, True)
    assert point["num_groups"] == 2 and point["settings"]["layers_per_group"] == 2
    assert point["tokens_per_second"] == pytest.approx(1024 / point["seconds_per_update"])
    assert point["weight_tokens_per_second"] == pytest.approx(point["tokens_per_second"] / 2)
    (slower,) = point["slower"]
    assert slower["seconds_per_update"] > point["seconds_per_update"], "with checkpointing"
    assert slower["settings"] == {**point["settings"], "gradient_checkpointing": True}

    run_python("-c", f"import schedule; schedule.TINY.save_pretrained('{tmp_path}')", cwd=BENCHMARKS)
    options = [f"--{name}={value}" for name, value in point["settings"].items()]
    done = run_python("-m", "slivertune", "plan", f"--model={tmp_path}", "--gpu=4090", "--json", *options, cwd=CHECKOUT)
    answer = json.loads(done.stdout)
    assert answer["time"] == point["time"]
    for name in ("peak_bytes", "need_bytes", "host_bytes"):
        assert answer[name] == point[name]


def test_curve_plans_each_setting_with_the_tiny_model(tmp_path: Path) -> None:
    points = run("curve.py", tmp_path / "curve.json", *CURVE)["points"]
    named = [*(f"m{number}" for number in (1, 2, 4, 5, 8, 9, 17)), "all", "all-tokens"]
    named += ["lora", "qlora", "sft", "zero3", "fsdp2"]
    assert [each["setting"] for each in points] == named and all(each["fits"] for each in points)


def test_curve_continues_and_plans_a_point_again_on_demand(tmp_path: Path) -> None:
    output = tmp_path / "curve.json"
    first = run("curve.py", output, *CURVE, "--settings", "m1")
    kept = {**first, "points": [{**first["points"][0], "kept": True}]}
    output.write_text(json.dumps(kept))
    both = run("curve.py", output, *CURVE, "--settings", "m1", "lora")
    assert [(each["setting"], each.get("kept")) for each in both["points"]] == [("m1", True), ("lora", None)]
    again = run("curve.py", output, *CURVE, "--settings", "m1", "--again")
    assert [(each["setting"], each.get("kept")) for each in again["points"]] == [("m1", None), ("lora", None)]
    assert again["points"][0] == first["points"][0]
    assert "has points of" in run("curve.py", output, *CURVE, "--efficiency", "0.5", expect=2)


def test_curve_accumulates_what_does_not_fit_at_once() -> None:
    # A card for one sequence and not two: the plan of all micro-batches, made anew, must be the point's.
    code = """
import dataclasses, json, curve
from slivertune.planning.make import make_plan
from slivertune.planning.plan import add_allowance
from slivertune.planning.planned_time import plan_time, with_room_ahead
from slivertune.planning.request import PlanRequest
card = curve.card_named("4090")
one = curve.Planner(curve.TINY, 0.6).point("4090", "m1", 2048)
small = dataclasses.replace(card, memory_bytes=one["need_bytes"] + 2**20)
curve.card_named = lambda name: small
point = curve.Planner(curve.TINY, 0.6).point("4090", "m1", 8192)
need = add_allowance(make_plan(PlanRequest(**point["settings"]), curve.TINY))
time = plan_time(with_room_ahead(need, small.memory_bytes), curve.TINY, small.rates())
two = dataclasses.replace(need.plan.request, batch_size=2 * need.plan.request.batch_size)
print(json.dumps({
    "point": point, "need": need.device_bytes, "seconds": time.seconds, "limit": small.memory_bytes,
    "two": add_allowance(make_plan(two, curve.TINY)).device_bytes,
}))
"""
    got = json.loads(run_python("-c", code, cwd=BENCHMARKS).stdout)
    settings = got["point"]["settings"]
    assert settings["gradient_accumulation_steps"] > 2
    assert settings.get("batch_size", 1) * settings["gradient_accumulation_steps"] * settings["seq_length"] == 8192
    assert got["point"]["need_bytes"] == got["need"] <= got["limit"] < got["two"]
    assert got["point"]["seconds_per_update"] == got["seconds"]


def test_curve_draws_and_tells_all_of_a_result(tmp_path: Path) -> None:
    output, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    result = run("curve.py", output, *CURVE, "--settings", "m1", "zero3")
    run_python(BENCHMARKS / "curve_plot.py", f"--input={output}", f"--output={picture}", cwd=CHECKOUT)
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = run_python("-c", f"import json, curve; print(curve.table(json.load(open('{output}'))))", cwd=BENCHMARKS)
    for text in ("4090: tokens an update", "HiFT, m = 1", "ZeRO-3", *(row["name"] for row in result["published"])):
        assert text in done.stdout
    assert {row["tokens"] for row in result["published"]} >= {4096, 8192, 16384, 32768, 524288}


def test_the_table_of_the_curve_is_that_of_the_committed_result() -> None:
    done = run_python(
        "-c", "import json, curve; print(curve.table(json.load(open('results/curve.json'))))", cwd=BENCHMARKS
    )
    assert done.stdout.strip() in (BENCHMARKS / "README.md").read_text(encoding="utf-8")


def test_host_weights_writes_what_both_ways_lose(tmp_path: Path) -> None:
    result = run("host_weights.py", tmp_path / "host_weights.json", "--quick", "--rows", "llama-3-8b, 512")
    assert_names_the_machine(result["environment"])
    (row,) = result["rows"]
    fsdp2 = row["fsdp2"]
    assert fsdp2["step_seconds"] > fsdp2["copies_seconds"] > 0
    assert fsdp2["lost_to_copies"] == pytest.approx(fsdp2["copies_seconds"] / fsdp2["step_seconds"])
    assert {each["num_resident"] for each in row["ideal"].values()} == {row["num_blocks"]}
    assert result["verdict"]["needs_a_streamer"] == (fsdp2["lost_to_copies"] > result["verdict"]["limit"])


def test_token_gradients_writes_a_row_for_each_pattern_and_ratio(tmp_path: Path) -> None:
    folder = base_model_folder(BASE_RECIPE, tmp_path / "slivertune" / "base_models")
    tiny = BaseRecipe(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_steps=1, corpus_bytes=2_000)
    save_base_model(train_base_model(tiny, ["def f(): pass\n" * 200], lambda step, loss: None), tiny, folder)
    options = ["--batches=1", "--batch_size=2", "--length=32", "--draws=1", "--plot", str(tmp_path / "plot.png")]
    result = run("token_gradients.py", tmp_path / "gradients.json", *options, XDG_CACHE_HOME=str(tmp_path))
    assert_names_the_machine(result["environment"])
    assert len(result["rows"]) == 12 and result["num_draws"] == 1
    assert all(-1 <= row["cosine"] <= 1 and row["norm_ratio"] > 0 for row in result["rows"])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


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
    [("gpu.py", ["--device=cuda"]), ("tokentune.py", ["--device=cuda"]), ("gpu.py", []), ("curve_measured.py", [])],
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
    options = ("--device=cpu", "--resident_blocks=1", "--card=4090", *TINY_GPU)
    result = run("gpu.py", tmp_path / "gpu.json", *options)
    check_gpu_result(result)
    simulated = result["simulated"]
    assert simulated["card"] == "GeForce RTX 4090" and len(simulated["groups"]) == 4
    assert simulated["mean_ms"] == pytest.approx(sum(group["ms"] for group in simulated["groups"]) / 4)
    assert simulated["bus_bandwidth"] == pytest.approx(1e9 * result["host_memory"]["inbound_gb_per_second"])
    assert 0 < simulated["mean_exposed_ms"] < simulated["mean_ms"]
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


def test_sst2_writes_every_run_and_the_comparison(tmp_path: Path) -> None:
    rows = "".join(f"a {'fine' if index % 2 else 'dull'} film , number {index}\t{index % 2}\n" for index in range(40))
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.tsv").write_text(rows, encoding="utf-8")
    options = ["--epochs=1", "--dense_rates", "1e-4", "--hift_rates", "4e-4", "--layers_per_group", "4"]
    result = run("sst2.py", tmp_path / "sst2.json", "--data", str(tmp_path), *options, name="--results")
    assert sorted(one["method"] for one in result["runs"]) == ["dense", "hift"]
    assert_names_the_machine(result["runs"][0]["environment"])
    assert 0 <= result["summary"]["hift"]["dev_accuracy"] <= 1


def make_tiny_embedded(cache: Path, num_layers: int = 6) -> Any:
    """A tiny model in the place of the embedded one, for what runs with that cache."""
    folder = base_model_folder(BASE_RECIPE, cache / "slivertune" / "base_models")
    tiny = BaseRecipe(
        hidden_size=16, intermediate_size=16, num_layers=num_layers, num_heads=2, num_steps=1, corpus_bytes=2_000
    )
    model = train_base_model(tiny, ["def f(): pass\n" * 200], lambda step, loss: None)
    save_base_model(model, tiny, folder)
    return model


def quality(cache: Path, *words: str) -> Any:
    """The rows of the tiny model, by name."""
    options = ("language", "--updates=2", *words, "--folder", str(cache / "runs"))
    content = run("quality.py", cache / "quality.json", *options, name="--results", XDG_CACHE_HOME=str(cache))
    assert str(cache) not in json.dumps(content)
    return {row["name"]: row for row in content["language"]}


def test_quality_searches_a_rate_and_adds_seeds_at_it_and_runs_a_row_again_when_asked(tmp_path: Path) -> None:
    make_tiny_embedded(tmp_path)
    row = quality(tmp_path, "--rows", "hift-4", "--seeds", "0")["hift-4"]
    assert_names_the_machine(row["environment"])
    assert row["options"] == "--method hift --layers_per_group 4" and row["failure"] is None
    (first,) = row["runs"]
    losses = {float(rate): after["eval_loss"] for rate, after in row["searched"].items()}
    assert losses[first["rate"]] == min(losses.values()) == first["after"]["eval_loss"]
    assert row["is_at_edge"] == (first["rate"] in (min(losses), max(losses))) and 3 <= len(losses) <= 7

    wider = quality(tmp_path, "--rows", "hift-4", "--seeds", "0", "1")["hift-4"]
    assert wider["searched"] == row["searched"] and wider["runs"][0] == first, "its seconds, too, are of the first time"
    assert [(run["seed"], run["rate"]) for run in wider["runs"]] == [(0, first["rate"]), (1, first["rate"])]

    (again,) = quality(tmp_path, "--rows", "hift-4", "--again", "--seeds", "0")["hift-4"]["runs"]
    assert again["after"] == first["after"] and again["seconds"] != first["seconds"]


def test_quality_keeps_rows_that_are_there_without_the_folder_of_runs(tmp_path: Path) -> None:
    make_tiny_embedded(tmp_path)
    run_of = {"after": {"eval_loss": 1.0}, "rate": 1.0, "seconds": 1.0, "peak_bytes": {"device": 1}}
    kept = [
        {"name": name, "failure": failure, "is_at_edge": False, "runs": [{**run_of, "seed": 0}][: failure is None]}
        for name, failure in (("dense", None), ("lora-16", "refused"), ("galore-64", None))
    ]
    (tmp_path / "quality.json").write_text(json.dumps({"language": kept}), encoding="utf-8")
    names = [row["name"] for row in kept]
    assert list(quality(tmp_path, "--rows", *names).values()) == kept and not (tmp_path / "runs").exists()
    rows = quality(tmp_path, "--rows", *names, "lisa", "hift-4", "--seeds", "0")
    assert list(rows) == ["dense", "hift-4", "lora-16", "galore-64", "lisa"]
    assert [rows[name] for name in names] == kept
    assert (
        rows["lisa"]["failure"] is None
        and rows["lisa"]["options"] == "--method lisa --lisa_blocks 2 --lisa_interval 20"
    )


def test_quality_keeps_why_a_row_was_refused(tmp_path: Path) -> None:
    make_tiny_embedded(tmp_path, num_layers=1)
    row = quality(tmp_path, "--rows", "lisa", "--seeds", "0")["lisa"]
    assert row["runs"] == [] and row["failure"].endswith("lisa_blocks=2 must be in [1, 1], the model's blocks")


def test_dial_shares_out_the_time_and_takes_the_best_rate_of_every_setting(tmp_path: Path) -> None:
    model = make_tiny_embedded(tmp_path)
    output, words = tmp_path / "dial.json", ("language", "--updates=20", "--rounds=1", "--seeds", "0", "1")

    def dial(*options: str, **settings: Any) -> Any:
        return run("dial.py", output, *words, *options, name="--results", XDG_CACHE_HOME=str(tmp_path), **settings)

    part = dial("--rates", "1e-3", "1e-2", "1e4")["language"]
    assert_names_the_machine(part["environment"])
    calibration, runs = part["calibration"], part["runs"]
    assert calibration["num_groups"] == {"1": 8, "2": 4, "4": 2, "8": 1}
    assert calibration["budget_cpu_seconds"] == 20 * calibration["seconds_per_update"]["1"][0]
    for m, (seconds,) in calibration["seconds_per_update"].items():
        assert calibration["num_updates"][m] == round(calibration["budget_cpu_seconds"] / seconds)

    sizes = [sum(each.numel() for each in layer.parameters()) for layer in model.model.layers]
    num_parameters = sum(each.numel() for each in model.parameters())
    counted = part["bytes"]
    assert counted["8"]["gradients"] == 4 * num_parameters and counted["1"]["gradients"] >= 4 * max(sizes)
    assert counted["1"]["gradients"] < counted["2"]["gradients"] < counted["4"]["gradients"] < counted["8"]["gradients"]
    for one in counted.values():
        assert one["device"] == one["weights"] + one["gradients"] + one["state"]
        assert one["weights"] >= 4 * num_parameters and one["host"] >= 8 * num_parameters

    keys = [(one["seed"], one["layers_per_group"], one["learning_rate"]) for one in runs]
    # A rate that no model stands is not tried at a second seed.
    rates = {0: (1e-3, 1e-2, 1e4), 1: (1e-3, 1e-2)}
    assert keys == [(seed, m, rate) for seed in (0, 1) for m in (1, 2, 4, 8) for rate in rates[seed]]
    assert [one["learning_rate"] for one in runs if one["diverged"]] == [1e4] * 4
    assert len({one["loss"] for one in runs if one["layers_per_group"] == 8 and not one["diverged"]}) == 4

    again = run_python(BENCHMARKS / "dial_table.py", output, cwd=CHECKOUT).stdout
    means = {
        rate: sum(one["loss"] for one in runs if (one["layers_per_group"], one["learning_rate"]) == (4, rate)) / 2
        for rate in (1e-3, 1e-2)
    }
    best = min(means, key=means.__getitem__)
    (row,) = (line for line in again.splitlines() if line.startswith("| 4 (2 groups) |"))
    assert f" {means[best]:.3f} (" in row and f" | {best:g} | {calibration['num_updates']['4']} | " in row
    assert again.count("10000: 1 of 1 diverged") == 4

    # Nothing is run twice, and a search goes on, with the best alone if so asked.
    part = dial("--rates", "5e-3", "2e-2", "--layers_per_group", "4", "--finalists=1")["language"]
    assert part["runs"][: len(runs)] == runs
    at_first = [one for one in part["runs"] if (one["layers_per_group"], one["seed"], one["diverged"]) == (4, 0, False)]
    winner = min(at_first, key=lambda one: one["loss"])["learning_rate"]
    more = [(one["seed"], one["learning_rate"]) for one in part["runs"][len(runs) :]]
    assert more == [(0, 5e-3), (0, 2e-2), *([] if winner in (1e-3, 1e-2) else [(1, winner)])]
    # With another budget the seconds would not be equal.
    assert "'updates_at_m_1': 21" in dial("--updates=21", expect=1)


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
    config.write_text(config.read_text(encoding="utf-8").replace('Order = "bottom2up"', 'Order = "top2down"'), "utf-8")
    git("commit", "--quiet", "--all", "--message", "another default order")
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
