import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Trainer

from slivertune.cli import main
from slivertune.planning.cards import Rates
from slivertune.planning.make import make_plan
from slivertune.planning.planned_time import plan_time
from slivertune.planning.request import PlanRequest
from slivertune.training.output import time_line
from slivertune.training.output.time_line import NOT_READY, TimeLine
from slivertune.training.output.time_process import TimeQuestion
from tests.training.tiny_runs import train, train_arguments, write_texts

REAL_COMMAND = (sys.executable, "-m", "slivertune.training.output.time_process")
ANSWER = {"seconds": 0.5, "num_tokens": 1024, "num_operators": 100.0}
LINE = "  time    500 ms planned an update (2,048 tokens a second; "
LATE = ("sleep", "600")


def saying(answer: Any) -> tuple[str, ...]:
    """A process that answers any question at once."""
    return (sys.executable, "-c", f"print({json.dumps(json.dumps(answer))})")


def tiny_question() -> TimeQuestion:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    request = PlanRequest(method="dense", seq_length=16, gradient_accumulation_steps=2, kernels="cpu")
    rates = Rates(flops=1e9, memory_bandwidth=1e9, bus_bandwidth=1e9)
    return TimeQuestion(plan=make_plan(request, config), config=config, rates=rates)


def begun(command: tuple[str, ...], *, is_on_cpu: bool = True) -> tuple[TimeLine, list[str]]:
    said: list[str] = []
    line = TimeLine(said.append, is_on_cpu=is_on_cpu)
    line.start(tiny_question(), "a rate", command)
    return line, said


def process_of(line: TimeLine) -> subprocess.Popen[bytes]:
    assert line._process is not None
    return line._process


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_process_plans_what_a_plan_of_the_same_run_by_the_same_rates_is() -> None:
    question = tiny_question()
    expected = plan_time(question.plan, question.config, question.rates)
    line, said = begun(REAL_COMMAND)
    process_of(line).wait(timeout=300)
    line.look()
    line.close()
    assert line.plan is not None and line.reason is None
    assert (line.plan.seconds, line.plan.num_tokens) == (expected.seconds, expected.num_tokens)
    assert len(said) == 1 and f"({expected.tokens_per_second:,.0f} tokens a second; a rate)" in said[0]
    # Each of the model's layers and losses is issued, twice, and its gradients.
    assert line.plan.num_operators > 100


def test_the_process_ends_when_nobody_is_there_to_hear_the_answer() -> None:
    late = "import time; from slivertune.training.output import time_process as module; "
    late += "module.answer = lambda question: time.sleep(600); module.main()"
    line, _ = begun((sys.executable, "-c", late))
    process = process_of(line)
    assert process.stdin is not None and process.poll() is None
    process.stdin.close()
    assert process.wait(timeout=120) == -signal.SIGTERM
    line.close()


def test_the_plan_is_said_once_when_an_update_ends_after_it_is_there() -> None:
    line, said = begun(saying(ANSWER))
    process_of(line).wait(timeout=60)
    assert said == []
    for _ in range(2):
        line.on_step_end(*[None] * 3)  # type: ignore[arg-type]
    line.close()
    assert said == [f"{LINE}a rate)"]


def test_what_is_written_to_a_disk_is_said_with_the_time() -> None:
    line, said = begun(saying({**ANSWER, "disk_bytes_per_hour": 3.5 * 2**40}))
    process_of(line).wait(timeout=60)
    line.close()
    assert said == [f"{LINE}a rate), 3.50 TiB an hour written to disk"]


@pytest.mark.parametrize(
    ("num_operators", "is_on_cpu", "is_noted"),
    [(2000, True, False), (3000, True, True), (3000, False, False), (30_000, False, True)],
)
def test_a_plan_of_operators_that_take_python_longer_says_so(
    num_operators: int, is_on_cpu: bool, is_noted: bool
) -> None:
    # 20 microseconds each: on a CPU on top of 500 ms, on a GPU beside them.
    line, said = begun(saying({**ANSWER, "num_operators": num_operators}), is_on_cpu=is_on_cpu)
    process_of(line).wait(timeout=60)
    line.close()
    assert (line.note is not None) == is_noted == said[0].endswith(f"to issue the {num_operators:,} of an update")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (saying({"error": "no such operator"}), "not planned: no such operator"),
        ((sys.executable, "-c", "raise SystemExit(9)"), "not planned: the process that plans it ended with code 9"),
        ((sys.executable, "-c", "print('{')"), "not planned: Expecting property name"),
    ],
    ids=["a planner that raises", "a process that dies", "no answer"],
)
def test_a_planner_that_fails_is_one_line(command: tuple[str, ...], reason: str) -> None:
    line, said = begun(command)
    process_of(line).wait(timeout=60)
    line.close()
    assert len(said) == 1 and said[0].startswith(f"  time    {reason}")
    assert line.plan is None and line.reason is not None and line.reason.startswith(reason)


def test_a_plan_that_is_not_there_in_time_is_given_up_and_its_process_reaped() -> None:
    line, said = begun(LATE)
    process = process_of(line)
    line.on_step_end(*[None] * 3)  # type: ignore[arg-type]
    line.close()
    assert (process.returncode, is_alive(process.pid)) == (-9, False)
    assert (line.plan, line.reason, said) == (None, NOT_READY, [])


def test_a_run_says_its_planned_time_and_holds_it_against_the_measured_one(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_line, "COMMAND", saying(ANSWER))
    results = train(tiny_base, write_texts(tmp_path), tmp_path / "out", "--packing", "--max_length", "32")
    out = " ".join(capsys.readouterr().out.split())
    assert out.count(" ".join(LINE.split())) == 1 and "GFLOP/s, measured here)" in out
    measured = results["tokens_per_second"]
    assert measured == pytest.approx(2 * 32 * results["steps_per_second"])
    assert results["planned_update"] == {**ANSWER, "tokens_per_second": 2048.0, "disk_bytes_per_hour": 0.0}
    assert f"tokens a second {measured:,.0f}, planned 2,048 ({2048 / measured - 1:+.1%})" in out


def test_a_run_that_ends_before_its_plan_says_that(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = train(tiny_base, write_texts(tmp_path), tmp_path / "out")
    assert (results["planned_update"], results["planned_update_note"]) == (None, NOT_READY)
    assert f"{results['tokens_per_second']:,.0f}, {NOT_READY}" in " ".join(capsys.readouterr().out.split())


def test_what_can_not_be_started_is_one_line_and_the_run_goes_on(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_line, "COMMAND", (str(tmp_path / "nothing"),))
    results = train(tiny_base, write_texts(tmp_path), tmp_path / "out")
    assert results["planned_update"] is None and results["tokens_per_second"] > 0
    assert capsys.readouterr().out.count("  time    not planned: [Errno 2]") == 1


def test_ctrl_c_leaves_no_process_behind(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = tmp_path / "pid"
    script = f"import os, pathlib, time; pathlib.Path({str(noted)!r}).write_text(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(time_line, "COMMAND", (sys.executable, "-c", script))
    alive: list[bool] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        for _ in range(600):
            if noted.exists() and noted.read_text():
                break
            time.sleep(0.1)
        alive.append(is_alive(int(noted.read_text())))
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "training_step", interrupted)
    assert main(train_arguments(tiny_base, write_texts(tmp_path), tmp_path / "out")) == 130
    assert alive == [True] and not is_alive(int(noted.read_text()))


def test_without_the_ledger_no_time_is_planned(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_line.TimeLine, "start", None)
    results = train(tiny_base, write_texts(tmp_path), tmp_path / "out", "--memory_ledger", "off")
    assert (results["planned_update"], results["planned_update_note"]) == (None, None)
