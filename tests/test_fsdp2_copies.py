"""The trace of FSDP2's copies from the host (`benchmarks/fsdp2_copies.py`) against torch itself, on one rank."""

import sys
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.torch_internals import NO_BACKWARD, running_backward
from slivertune.planning.gathered_units import units_of
from tests.conftest import CHECKOUT
from tests.helpers.models import tiny_llama, token_batches
from tests.helpers.ranks import run_ranks
from tests.parallel.reference import on_fsdp2_ranks

sys.path.append(str(CHECKOUT / "benchmarks"))
from fsdp2_copies import TORCH, FSDP2Copies
from weight_moments import Moment, WeightMoments

Copies = list[list[tuple[str, str]]]
"""Of each step: in which pass, and a parameter of the unit."""


def build() -> tuple[Any, st.HiFT, dict[str, torch.Tensor]]:
    model = tiny_llama()
    enable_checkpointing(model, {"use_reentrant": False})
    return model, st.HiFT(model, torch.optim.AdamW, lr=1e-2), token_batches(1)[0]


class CopiesToTheDevice(TorchDispatchMode):
    """Notes the copies out of some memory."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and type(args[1]) is torch.Tensor:
            name = self._names.get(args[1].untyped_storage()._cdata)
            if name is not None:
                self.seen.append(("forward" if running_backward() == NO_BACKWARD else "backward", name))
        return func(*args, **(kwargs or {}))


def copies_of_torch(rank: int, num_ranks: int) -> Copies:
    """What a cycle of HiFT under FSDP2 copies; on a CPU both are the host, but the copies are the same."""
    model, hift, batch = build()
    found: Copies = []
    with on_fsdp2_ranks(plugin={"cpu_offload": CPUOffloadPolicy(pin_memory=False)}) as accelerator:
        model, optimizer = st.prepare(accelerator, model, hift)
        for _ in range(hift.num_groups):
            states = [each._get_fsdp_state() for each in model.modules() if isinstance(each, FSDPModule)]
            firsts = [group.fsdp_params[0] for state in states for group in state._fsdp_param_groups]
            shards = {each._sharded_param_data.untyped_storage()._cdata: each._param_fqn for each in firsts}
            with CopiesToTheDevice(shards) as copies:
                loss = model(**batch).loss
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(copies.seen)
    return found


def copies_of_trace(first_of_torch: set[str]) -> Copies:
    """The same by the trace."""
    model, hift, batch = build()
    *blocks, bottom, head, _ = units_of(model)
    units = [bottom, *reversed(blocks), head]
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    found: Copies = []
    trace = FSDP2Copies([unit.num_bytes for unit in units], [unit.stays for unit in units], 0)

    def mark(moment: Moment) -> None:
        trace.at(moment)

    WeightMoments(units, mark)
    for _ in range(hift.num_groups):
        trace.copied.clear()
        model(**batch).loss.backward()
        hift.step()
        found.append(
            [
                (phase, next(n for n in (name_of[id(p)] for p in units[unit].parameters) if n in first_of_torch))
                for phase, unit in trace.copied
            ]
        )
    return found


@pytest.mark.slow
def test_torch_copies_each_unit_when_the_trace_says() -> None:
    assert torch.__version__.split("+")[0] == TORCH, "look the lines up again, in the torch that is here"
    (expected,) = run_ranks(copies_of_torch, 1)
    found = copies_of_trace({name for step in expected for _, name in step})
    assert found == expected
    assert [len(step) for step in expected] == sorted((len(step) for step in expected), reverse=True)
    assert any(phase == "backward" for phase, _ in expected[0])
