"""The example with several ranks runs under both launchers, resumes what it saved, and leaves a plain model behind."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.conftest import CHECKOUT
from tests.helpers.ranks import free_port

SCRIPT = CHECKOUT / "examples" / "accelerate_ranks.py"
LINE = re.compile(
    r"(?P<layout>\w+), (?P<ranks>\d) ranks, (?P<steps>\d+) steps: loss (?P<first>[\d.]+) at first, "
    r"(?P<half>[\d.]+) half way, (?P<resumed>[\d.]+) resumed, (?P<end>[\d.]+) at the end"
)
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=PORT"],
    # Without a GPU, accelerate starts several processes only if told that there are several GPUs.
    "accelerate launch": [
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
        *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=PORT"),
    ],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_train_save_resume_and_save_the_model(launcher: str, tmp_path: Path) -> None:
    port = str(free_port())
    done = subprocess.run(
        [
            sys.executable,
            *(part.replace("PORT", port) for part in LAUNCHERS[launcher]),
            *(str(SCRIPT), "--steps=16", "--hidden=32", "--blocks=2", "--length=32", f"--folder={tmp_path}/ranks"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = LINE.findall(done.stdout)
    assert len(lines) == 1, done.stdout + done.stderr
    layout, ranks, steps, first, half, resumed, end = lines[0]
    assert (ranks, steps) == ("2", "16") and layout in ("MULTI_CPU", "MULTI_GPU")
    assert float(end) < float(half) < float(first)
    assert resumed == half
    assert (tmp_path / "ranks" / "half" / "hift").is_dir()
    assert LlamaForCausalLM.from_pretrained(tmp_path / "ranks" / "model").config.hidden_size == 32
