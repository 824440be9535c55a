"""What the command says of seconds, on tensors without data and a card that is named."""

import json
from pathlib import Path

import pytest

from slivertune.planning.cards import card_named
from slivertune.planning.time_report import format_seconds
from tests.helpers.plan_requests import run_plan
from tests.planning.made import write_config

pytestmark = pytest.mark.usefixtures("plans_made_once")

RUN = ["--precision", "mixed_hi", "--batch_size", "1", "--seq_length", "64"]


def said(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    run_plan(["--model", str(write_config(tmp_path / "model", num_hidden_layers=1)), *RUN, *words])
    return capsys.readouterr().out


def test_a_card_adds_seconds_by_part_tokens_a_second_and_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu", "4090", "--tokens", "3e6", "--num_train_epochs", "2"]
    values = json.loads(said([*words, "--json"], tmp_path, capsys))
    time = values["time"]
    together = sum(time["computing_seconds"].values()) + sum(time["waiting_seconds"].values())
    assert time["seconds_per_update"] == pytest.approx(together)
    assert time["tokens_per_second"] == pytest.approx(64 / together)
    num_groups = sum(len(group["indices"]) for group in values["groups"])
    assert time["weight_tokens_per_second"] == pytest.approx(64 / together / num_groups) and num_groups > 1
    assert time["hours"] == pytest.approx(6e6 / time["tokens_per_second"] / 3600)
    assert values["gpu"] == "GeForce RTX 4090" and values["fit"]["limit_bytes"] == 24 * 2**30 and values["fit"]["fits"]
    text = said(words, tmp_path, capsys)
    for part in ("update time on a GeForce RTX 4090", "forward", "backward", "update", "64 tokens", "6,000,000 tokens"):
        assert part in text
    assert f"{1 / num_groups:.1%}" in text and f"learns from {time['weight_tokens_per_second']:,.0f} tokens/s" in text
    assert format_seconds(time["seconds_per_update"]) in text and f"{time['hours']:,.1f} h" in text
    assert "99.1 TFLOP/s (60% of peak; --efficiency)" in text and "fits 24.00 GiB" in text
    slow, fast = time["range"]["tokens_per_second"]
    assert slow <= time["tokens_per_second"] <= fast and time["range"]["efficiency"] == [0.3, 0.9]
    assert f"{slow:,.0f} tokens/s at 30% of the peak, {fast:,.0f} at 90%" in text
    for efficiency, speed in ((0.3, slow), (0.9, fast)):
        alone = json.loads(said([*words, "--efficiency", str(efficiency), "--json"], tmp_path, capsys))["time"]
        assert alone["tokens_per_second"] == pytest.approx(speed)


def test_a_weight_learns_from_the_selected_tokens_of_its_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu", "4090", "--layers_per_group", "1", "--json"]  # an embedding, a block and a head
    for more, share in (([], 1.0), (["--token_ratio", "0.25"], 0.25)):
        time = json.loads(said([*words, *more], tmp_path, capsys))["time"]
        assert time["weight_tokens_per_second"] == pytest.approx(share / 3 * time["tokens_per_second"])
    above = ["--inactive", "above", "--gradients", "stepped", "--precision", "fp32"]
    assert "learns from at least " in said([*words[:-1], *above], tmp_path, capsys)


def test_half_the_efficiency_takes_longer_and_fp32_longest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = card_named("3090")
    flops = [
        json.loads(said(["--gpu", "3090", *words, "--json"], tmp_path, capsys))["time"]["rates"]["flops"]
        for words in ([], ["--efficiency", "0.3"], ["--precision", "fp32"])
    ]
    assert flops == pytest.approx([0.6 * card.peak_flops, 0.3 * card.peak_flops, 0.6 * card.fp32_flops])


def test_a_slow_disk_is_waited_for_and_its_rate_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "4090", "--state", "disk", "--disk_bandwidth", "1e8"]
    time = json.loads(said([*words, "--json"], tmp_path, capsys))["time"]
    assert time["rates"]["disk_bandwidth"] == 1e8
    # All of a cycle is read and written; nothing else takes as long.
    written = time["disk_bytes_written_per_hour"] / 3600 * time["seconds_per_update"]
    assert time["seconds_per_update"] == pytest.approx(2 * written / 1e8)
    assert "0.1 GB/s of disk (--disk_bandwidth)" in said(words, tmp_path, capsys)


def test_fit_without_a_size_is_the_cards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(said(["--fit", "--gpu", "4060Ti-16GB", "--json"], tmp_path, capsys))
    assert values["fit"]["limit_bytes"] == 16 * 2**30 and values["fit"]["steps"] == []
    with pytest.raises(ValueError, match=r"no CUDA device here whose rates could be used\. Name one by --gpu"):
        said(["--fit"], tmp_path, capsys)


def test_what_does_not_fit_the_limit_has_no_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "4090", "--sweep", "seq_length=64,128", "--fit", "500MiB"]
    run_plan(
        [
            "--model",
            str(write_config(tmp_path / "model", num_hidden_layers=1)),
            "--precision",
            "mixed_hi",
            *words,
            "--json",
        ]
    )
    points = json.loads(capsys.readouterr().out)["sweep"]
    assert [(point["fits"], "time" in point) for point in points] == [(False, False)] * 2
    run_plan(
        ["--model", str(write_config(tmp_path / "model", num_hidden_layers=1)), "--precision", "mixed_hi", *words[:-2]]
    )
    text = capsys.readouterr().out
    assert "tokens/s" in text and "…" not in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--efficiency", "1.5"], r"--efficiency 1\.5 must be more than 0 and at most 1"),
        (["--disk_bandwidth", "0"], r"--disk_bandwidth 0\.0 must be more than 0"),
        (["--num_train_epochs", "2"], "takes effect only with --tokens"),
        (["--efficiency", "0.3"], r"--efficiency 0\.3 takes effect only with a card\. Name one with --gpu"),
        (["--disk_bandwidth", "1e8"], r"--disk_bandwidth 1e\+08 takes effect only with a card"),
        (["--num_labels", "7"], "num_labels=7 with task='causal_lm', which has no classes"),
        (["--tokens", "many"], "'many' must be a number, at least 1"),
        (["--tokens", "3e6"], "no CUDA device here"),
        (["--gpu", "5090x"], "gpu='5090x' must be one of"),
    ],
)
def test_what_can_not_be_said_is_an_error(
    words: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=part):
        said(words, tmp_path, capsys)


def test_seconds_have_three_digits() -> None:
    assert [format_seconds(value) for value in (0.0123456, 1.23456, 123.4)] == ["12.3 ms", "1.23 s", "123 s"]
