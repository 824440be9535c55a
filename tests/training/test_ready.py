from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from slivertune.tokentune.config import TokenTune
from slivertune.training.assemble import assemble
from slivertune.training.options.parse import parse_train_arguments
from slivertune.training.ready import Run
from slivertune.training.run import execute
from tests.training.tiny_runs import COMBINATIONS, train_arguments, write_texts


def make_run(base: Path, folder: Path, *more: str) -> Run:
    arguments = train_arguments(base, write_texts(folder), folder / "out", *more, "--max_steps", "2")
    return assemble(parse_train_arguments(arguments[1:]), Console(quiet=True))


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", [name for name in COMBINATIONS if "tokens" in name])
def test_a_run_takes_the_selection_off_its_model_in_the_end(
    name: str, fails: bool, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tiny_base, tmp_path, *COMBINATIONS[name])
    model = run.trainer.model
    assert model is not None
    with pytest.raises(RuntimeError, match="has TokenTune attached already"):
        TokenTune(ratio=0.5).attach(model)
    if fails:
        monkeypatch.setattr(run.trainer, "train", lambda **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            execute(run, Console(quiet=True))
    else:
        execute(run, Console(quiet=True))
    TokenTune(ratio=0.5).attach(model).remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("method", ["hift", "sft"])
def test_a_run_unfreezes_what_its_method_froze(method: str, tiny_base: Path, tmp_path: Path) -> None:
    run = make_run(tiny_base, tmp_path, "--method", method, *(("--density", "0.1") if method == "sft" else ()))
    model = run.trainer.model
    assert isinstance(model, torch.nn.Module)
    assert not all(parameter.requires_grad for parameter in model.parameters())
    run.close()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in AutoModelForCausalLM.from_pretrained(tiny_base).named_parameters()}
