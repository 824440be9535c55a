from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import TrainerCallback

from slivertune.core.ledger import Census, claim
from slivertune.hift.rotation import Rotation
from slivertune.training.ledger_lines import LedgerLines
from slivertune.training.methods import hift as hift_method
from slivertune.training.methods.dense import DenseMethod
from slivertune.training.methods.hift import HiFTMethod
from slivertune.training.options.methods import HiFTOptions
from tests.helpers.models import LAYERS, tiny_llama
from tests.training.test_callbacks import make_trainer


def counted(
    folder: Path, *callbacks: TrainerCallback, say: Any = print, num_cycles: int | None = None, **options: Any
) -> tuple[Census, Census]:
    """The peak, and each kind's highest, of a dense run."""
    trainer = make_trainer(folder, *callbacks, **options)
    ledger = LedgerLines(trainer.model, DenseMethod().cycle, say, num_cycles)  # type: ignore[arg-type]
    trainer.add_callback(ledger)
    trainer.train()
    assert ledger.peak is not None and ledger.highest is not None
    return ledger.peak, ledger.highest


def test_cycles_are_counted_by_steps_or_by_log_lines() -> None:
    rotation = Rotation(order=(0, 1, 2, 3, 4), steps_per_group=1, updates=23, skipped={4: 2})
    method = HiFTMethod(HiFTOptions())
    method._attached = SimpleNamespace(rotation=rotation, cycle_length=5)
    state: Any = SimpleNamespace(global_step=25, logging_steps=10)
    assert method.cycle(state) == (2, "cycle    4")
    assert DenseMethod().cycle(state) == (2, "step   20")


def test_a_leak_shows_as_bytes_that_no_one_claimed(tmp_path: Path) -> None:
    leaked: list[torch.Tensor] = []

    class Leak(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            leaked.append(torch.zeros(2**20, dtype=torch.uint8))

    (_, without), (_, leaking) = (counted(tmp_path, *callbacks, max_steps=4) for callbacks in ([], [Leak()]))
    assert leaking.residual - without.residual >= 3 * 2**20


def test_a_line_is_about_its_own_cycle_alone_and_the_peak_about_all(tmp_path: Path) -> None:
    class Borrow(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                claim(torch.zeros(50_000_000, dtype=torch.uint8), "state")

    said: list[str] = []
    peak, highest = counted(tmp_path, Borrow(), say=said.append, max_steps=2, optim="sgd")
    assert ["state on the device 50.0 MB" in line for line in said] == [True, False]
    assert highest.state == 50_000_000 <= peak.device


def test_evaluation_is_not_counted(tmp_path: Path) -> None:
    (_, few), (_, many) = (
        counted(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=num_rows)
        for num_rows in (1, 4)
    )
    assert few.residual == many.residual


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
    method = HiFTMethod(HiFTOptions(layers_per_group=1, steps_per_group=1))
    method.attach(trainer)
    trainer.add_callback(LedgerLines(model, method.cycle, lambda line: said.append((trainer.state.global_step, line))))
    trainer.train()
    assert [(step, line.partition("  weights")[0]) for step, line in said] == [
        (LAYERS + 1, "cycle    1"),
        (2 * LAYERS + 1, "cycle    2"),
    ]


def test_it_stops_after_the_cycles_asked_for_and_leaves_the_dispatcher_clean(tmp_path: Path) -> None:
    said: list[str] = []
    asked: list[int] = []

    class Grow(TrainerCallback):
        """Makes each update's line another."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            asked.append(state.global_step)
            claim(torch.zeros(10**6 * len(asked), dtype=torch.uint8), "state")

    counted(tmp_path, Grow(), say=said.append, num_cycles=2, max_steps=6)
    assert len(said) == 2 and len(asked) == 6 and _get_current_dispatch_mode() is None


def test_a_cycle_like_the_last_one_has_no_line(tmp_path: Path) -> None:
    class Borrow(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                claim(torch.zeros(50_000_000, dtype=torch.uint8), "state")

    said: list[str] = []
    counted(tmp_path, Borrow(), say=said.append, max_steps=7, optim="sgd")
    assert [line.split("  weights")[0] for line in said] == ["step    1", "step    4", "step    5"]
