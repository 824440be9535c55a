"""docs/first-hour.md, all of its blocks as one script."""

import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.training.tiny import chat_tokenizer, llama_config

HOLDS = """
import sys, time

if {"train", "runs/first"} <= set(sys.orig_argv):
    from slivertune.training.interruption import Interruption

    def hold(self, args, state, control, **kwargs):
        while state.global_step == 30 and self._asked_at is None and self._resumed_from is None:
            time.sleep(0.01)

    Interruption.on_step_begin = hold
"""
"""A module that Python imports at its start: a first run goes halfway and awaits Ctrl-C there.

The tiny model's 60 updates may end sooner than a shell on a busy machine sees the first checkpoint.
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "base"
    LlamaForCausalLM(llama_config(positions=256)).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_first_hour_runs_as_it_is_written(checkout: Path, base: Path, tmp_path: Path) -> None:
    page = (checkout / "docs" / "first-hour.md").read_text(encoding="utf-8")
    script = "\n".join(re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    folder = tmp_path / "hour"
    folder.mkdir()
    start = tmp_path / "start"
    start.mkdir()
    (start / "sitecustomize.py").write_text(HOLDS, encoding="utf-8")
    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", script],
        cwd=folder,
        env={
            **os.environ,
            "CHECKOUT": str(checkout),
            "MODEL": str(base),
            # What the package needs is taken from the environment of the tests; its index is not asked.
            "PYTHONPATH": os.pathsep.join([str(start), sysconfig.get_path("purelib")]),
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    log = (folder / "first.log").read_text(encoding="utf-8")
    assert "interrupted; the last whole checkpoint is" in log
    assert "\ninterrupted\n" in done.stdout and "before it was interrupted" not in done.stdout
    assert (folder / "hour" / "bin" / "slivertune").is_file()
    state = json.loads((folder / "runs" / "first" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 60
    results = json.loads((folder / "runs" / "first" / "results.json").read_text(encoding="utf-8"))
    before, after = results["before"]["eval_loss"], results["after"]["eval_loss"]
    assert f"loss before {before:.3g}"[:14] in done.stdout and after < before
    assert (folder / "runs" / "first" / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert re.findall(r"^(runs/\S+) '", done.stdout, re.MULTILINE) == ["runs/first/model", "runs/merged"]
