"""What each of two ranks does for the tests of `slivertune train`, and what it saw from inside of the runs."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from slivertune.cli import main
from slivertune.training import run as training_run
from tests.helpers.process_state import forget_accelerate
from tests.helpers.rank_processes import free_port
from tests.helpers.ranks import ran_once
from tests.interop.trainer_runs import whole
from tests.training.tiny_runs import train_arguments

# Where a gradient is next to nothing, Adam's first step turns its rounding into a whole step.
STEPS = ("--max_steps", "6", "--save_steps", "4", "--logging_steps", "2", "--adam_epsilon", "1e-4")
STOPPED = 4
"""The update after which the checkpoint is taken that a resumed run continues from."""
OF_METHOD = {"dense": (), "lora": ("--lora_rank", "4")}
PROBE = torch.arange(20).unsqueeze(0)
"""Tokens that a trained model and a loaded one are compared on."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the command."""

    method: str
    layout: str
    more: tuple[str, ...] = ()
    resumes: str | None = None
    """The case whose checkpoint it continues from."""
    names_bucket: bool = True
    """Whether the DeepSpeed configuration says how large the reduce bucket is, which accelerate's presets can't."""
    has_bf16: bool = False
    """Whether the machine claims to have GPUs with bf16, which the Trainer asks for under DeepSpeed."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of a run."""

    code: int
    printed: str
    """All that it wrote to standard output and standard error, by whatever library."""
    engine: str = ""
    world_size: int = 0
    facts: dict[str, Any]
    """Of DeepSpeed's engine; empty elsewhere."""
    batches: list[torch.Tensor]
    """The tokens of every training forward."""
    losses: list[float]
    weights: dict[str, torch.Tensor]
    """What was trained, whole."""
    logits: torch.Tensor | None = None


def deepspeed_options(case: Case, folder: Path) -> tuple[str, ...]:
    """The arguments that name a DeepSpeed configuration, which the first rank writes."""
    if not case.layout.startswith("zero"):
        return ()
    stage: dict[str, Any] = {"stage": int(case.layout[-1]), "stage3_param_persistence_threshold": 0}
    if case.names_bucket:
        stage["reduce_bucket_size"] = 20000
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {**dict.fromkeys(auto, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": stage}
    path = folder / f"{case.layout}{'' if case.names_bucket else '-without-bucket'}.json"
    if dist.get_rank() == 0:
        path.write_text(json.dumps(config), encoding="utf-8")
    return ("--deepspeed", str(path))


def forget_the_last_run() -> None:
    """What libraries keep for the whole life of a process, which has one run elsewhere."""
    forget_accelerate()
    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def meet_at_a_new_address() -> None:
    """Let the ranks of a run find each other as they do when a launcher starts them."""
    port = [free_port()]
    dist.broadcast_object_list(port)
    os.environ["MASTER_PORT"] = str(port[0])


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Lead both standard streams to a file, whoever writes to them."""
    kept = os.dup(1), os.dup(2)
    with path.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, old in zip((1, 2), kept, strict=True):
                os.dup2(old, stream)
                os.close(old)


def engine_facts(engine: Any) -> dict[str, Any]:
    if not hasattr(engine, "zero_optimization_stage"):
        return {}
    return {
        "stage": int(engine.zero_optimization_stage()),
        "bf16": engine.bfloat16_enabled(),
        "bucket": engine.zero_reduce_bucket_size(),
    }


class Watch:
    """Looks into a run of the command from the rank that makes it."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []
        self.found: dict[str, Any] = {"facts": {}, "losses": [], "weights": {}}
        self._execute = training_run.execute

    def execute(self, ready: Any, console: Any) -> Any:
        """In place of the package's own, which it calls."""
        trainer = ready.trainer
        hook = trainer.model.register_forward_pre_hook(self._look, with_kwargs=True)
        results = self._execute(ready, console)
        hook.remove()
        engine: Any = trainer.model_wrapped
        engine.eval()
        with torch.no_grad():
            logits = engine(input_ids=PROBE).logits.float()
        trained = {key: value for key, value in trainer.model.named_parameters() if value.requires_grad}
        self.found = {
            "engine": type(engine).__name__,
            "world_size": trainer.args.world_size,
            "facts": engine_facts(engine),
            "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
            "weights": {key: whole(value) for key, value in trained.items()},
            "logits": logits,
        }
        return results

    def _look(self, module: Any, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.batches.append(kwargs["input_ids"].clone())


def run(case: Case, name: str, base: Path, data: Path, folder: Path) -> Seen:
    """Run the command in this process, and look into it.

    Args:
        case: The run.
        name: Its folder's name.
        base: The model.
        data: The dataset.
        folder: Of all runs.
    """
    forget_the_last_run()
    more = [*STEPS, *OF_METHOD.get(case.method, ()), *deepspeed_options(case, folder), *case.more]
    if case.resumes is not None:
        more += ["--resume_from_checkpoint", str(folder / case.resumes / f"checkpoint-{STOPPED}")]
    arguments = train_arguments(base, data, folder / name, *more, method=case.method)
    meet_at_a_new_address()
    words, watch = folder / f"{name} {dist.get_rank()}.txt", Watch()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(training_run, "execute", watch.execute))
        # A machine that claims to have a GPU with bf16, for which the Trainer asks under DeepSpeed.
        for module in ("slivertune.training.ranks.processes", "transformers.training_args") if case.has_bf16 else ():
            stack.enter_context(mock.patch(f"{module}.is_torch_bf16_gpu_available", return_value=True))
        stack.enter_context(printed_to(words))
        code = main(["--debug", *arguments])
    return Seen(code=code, printed=words.read_text(encoding="utf-8"), batches=watch.batches, **watch.found)


RanksOf = Callable[[str], list[Seen]]
"""Gives what each rank has seen of the run of this name."""


def on_two_ranks(cases: dict[str, Case], base: Path, data: Path, folder: Path) -> RanksOf:
    """Runs that are made when they are first asked for, after those whose checkpoints they continue from."""
    run_once = ran_once(on_a_rank, 2, base, data, folder)

    def seen(name: str) -> list[Seen]:
        origin = cases[name].resumes
        if origin is not None:
            seen(origin)
        return run_once(cases[name], name)

    return seen


def on_a_rank(rank: int, world: int, case: Case, name: str, base: Path, data: Path, folder: Path) -> Seen:
    import deepspeed

    # DeepSpeed would first compile its shared-memory collectives for a minute; gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return run(case, name, base, data, folder)
