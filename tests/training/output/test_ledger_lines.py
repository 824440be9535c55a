from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from slivertune.core.ledger import claim
from slivertune.hift.rotation import Rotation
from slivertune.training.methods import hift as hift_method
from slivertune.training.methods.dense import DenseMethod
from slivertune.training.methods.hift import HiFTArguments, HiFTMethod
from slivertune.training.output.ledger_lines import LedgerLines
from tests.helpers.models import LAYERS, tiny_llama
from tests.training.test_callbacks import ROWS, make_trainer


def test_cycles_are_counted_by_steps_or_by_log_lines() -> None:
    rotation = Rotation(order=(0, 1, 2, 3, 4), steps_per_group=1, updates=23, skipped={4: 2})
    method = HiFTMethod(HiFTArguments())
    method._attached = SimpleNamespace(rotation=rotation, cycle_length=5)
    state: Any = SimpleNamespace(global_step=25, logging_steps=10)
    assert method.cycle(state) == (2, "cycle    4")
    assert DenseMethod().cycle(state) == (2, "step   20")


def test_a_leak_shows_as_bytes_that_no_one_claimed(tmp_path: Path) -> None:
    leaked: list[torch.Tensor] = []

    class Leak(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            leaked.append(torch.zeros(2**20, dtype=torch.uint8))

    peaks = []
    for callbacks in ([], [Leak()]):
        model = tiny_llama()
        trainer = make_trainer(tmp_path, *callbacks, model=model, max_steps=4)
        ledger = LedgerLines(model, DenseMethod().cycle, lambda line: None)
        trainer.add_callback(ledger)
        trainer.train()
        assert ledger.highest is not None
        peaks.append(ledger.highest.residual)
    assert peaks[1] - peaks[0] >= 3 * 2**20


def test_a_line_is_about_its_own_cycle_alone_and_the_peak_about_all(tmp_path: Path) -> None:
    class Borrow(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                claim(torch.zeros(50_000_000, dtype=torch.uint8), "state")

    said: list[str] = []
    model = tiny_llama()
    trainer = make_trainer(tmp_path, Borrow(), model=model, max_steps=2, optim="sgd")
    ledger = LedgerLines(model, DenseMethod().cycle, said.append)
    trainer.add_callback(ledger)
    trainer.train()
    assert ["state on the device 50.0 MB" in line for line in said] == [True, False]
    assert ledger.highest is not None and ledger.peak is not None
    assert ledger.highest.state == 50_000_000
    assert ledger.peak.device >= 50_000_000


def test_evaluation_is_not_counted(tmp_path: Path) -> None:
    residual = []
    for num_rows in (2, 16):
        model = tiny_llama()
        trainer = make_trainer(tmp_path, model=model, max_steps=4, eval_strategy="steps", eval_steps=1)
        trainer.args.per_device_eval_batch_size = num_rows
        trainer.eval_dataset = ROWS
        ledger = LedgerLines(model, DenseMethod().cycle, lambda line: None)
        trainer.add_callback(ledger)
        trainer.train()
        assert ledger.highest is not None
        residual.append(ledger.highest.residual)
    assert residual[0] == residual[1]


def test_a_line_ends_each_cycle_of_hift_also_after_a_skipped_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hift_method, "FEWEST_UPDATES_A_LINE", 1)

    class Skip(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                kwargs["model"].zero_grad()

    said: list[tuple[int, str]] = []
    model = tiny_llama()
    trainer = make_trainer(tmp_path, Skip(), model=model, max_steps=2 * LAYERS + 1)
    method = HiFTMethod(HiFTArguments())
    method.attach(trainer)
    trainer.add_callback(LedgerLines(model, method.cycle, lambda line: said.append((trainer.state.global_step, line))))
    trainer.train()
    assert [(step, line.partition("  weights")[0]) for step, line in said] == [
        (LAYERS + 1, "cycle    1"),
        (2 * LAYERS + 1, "cycle    2"),
    ]


def test_it_stops_after_the_cycles_asked_for_and_leaves_the_dispatcher_clean(tmp_path: Path) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    said: list[str] = []
    model = tiny_llama()
    trainer = make_trainer(tmp_path, model=model, max_steps=6)
    trainer.add_callback(LedgerLines(model, DenseMethod().cycle, said.append, num_cycles=2))
    trainer.train()
    assert len(said) == 2
    assert _get_current_dispatch_mode() is None
