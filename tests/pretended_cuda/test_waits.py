"""Where the host waits for the device: by operator, and within a step of HiFT by base optimizer."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.ranks import quick
from tests.pretended_cuda.on_device import on_device

NUM = 8


def mask(values: torch.Tensor) -> torch.Tensor:
    return values > 0


OPERATORS: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "item": (lambda values: values[0].item(), 1),
    "tolist": (lambda values: values.tolist(), 1),
    "bool": (lambda values: bool(values[0] > 0), 1),
    "cpu": (lambda values: values.cpu(), 1),
    "equal": (lambda values: torch.equal(values, values + 1), 1),
    "nonzero": (lambda values: values.nonzero(), 1),
    "masked_select": (lambda values: values.masked_select(mask(values)), 1),
    "indexing by booleans": (lambda values: values[mask(values)], 1),
    "writing rows by booleans": (lambda values: values.index_put_((mask(values),), values[:4]), 1),
    "indexing by the host's indices": (lambda values: values[torch.tensor([0, 2])], 1),
    "unique": (lambda values: values.unique(), 1),
    "repeat_interleave": (lambda values: values.repeat_interleave(torch.ones_like(values, dtype=torch.long)), 1),
    "bincount": (lambda values: torch.bincount(values.abs().long()), 1),
    "a tensor from the host": (lambda values: values + torch.tensor([1.0] * NUM, device="cuda"), 1),
    "an event": (lambda values: torch.cuda.current_stream().record_event().synchronize(), 1),
    "a stream": (lambda values: torch.cuda.current_stream().synchronize(), 1),
    "the device": (lambda values: torch.cuda.synchronize(), 1),
    "indexing by numbers": (lambda values: values[torch.ones_like(values, dtype=torch.long)], 0),
    "writing one number by booleans": (lambda values: values.__setitem__(mask(values), 1.0), 0),
    "where": (lambda values: torch.where(mask(values), values, 0.0), 0),
    "a number of the host": (lambda values: values + torch.tensor(1.0), 0),
    "zeros": (lambda values: torch.zeros(NUM, device="cuda"), 0),
    "nonzero of a given size": (lambda values: torch.nonzero_static(values, size=NUM), 0),
    "repeat_interleave to a given size": (
        lambda values: values.repeat_interleave(torch.ones_like(values, dtype=torch.long), output_size=NUM),
        0,
    ),
    "an event between streams": (lambda values: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()), 0),
}
"""An operator, and how often the host waits in it. From torch's own warnings of synchronization."""


def waits_of(name: str) -> int:
    from tests.pretended_cuda.detector import Detector

    values = torch.arange(NUM, device="cuda") - 3.0
    with Detector() as found:
        OPERATORS[name][0](values)
    return sum(found.waits.values())


@pytest.mark.parametrize("name", OPERATORS)
def test_each_operator_waits_as_it_does_on_a_card(name: str) -> None:
    assert on_device(waits_of, name) == OPERATORS[name][1]


NEVER_WAITS = (
    *("AdamW", "AdamW amsgrad", "Adam", "SGD", "SGD momentum", "Adagrad", "RMSprop", "transformers Adafactor with lr"),
    *("AdamW fused", "AdamW capturable", "AdamW of loops"),
)
KERNELS: dict[str, dict[str, bool]] = {
    "AdamW fused": {"fused": True},
    "AdamW capturable": {"capturable": True},
    "AdamW of loops": {"foreach": False},
}
PLACES = ("device", "host", "stepped")
KEPT = (("AdamW", "host"), ("AdamW fused", "stepped"), ("AdamW capturable", "device"))
"""What `make test` runs."""
WAITS_BY_ITSELF = {"torch Adafactor": 2, "transformers Adafactor": 1, "AdamW8bit": 1}
"""How often a base optimizer waits in its step of a tensor, at least."""


def waits_of_steps(name: str, gradients: str) -> tuple[int, dict[str, int]]:
    """Tensors of the last turns of a third cycle, and the waits in them that the batches do not cause."""
    from tests.helpers.models import LAYERS, small_decoder, token_batches
    from tests.hift.cases import BIG_VOCAB, OPTIMIZERS, hift_over
    from tests.pretended_cuda.detector import Detector

    more = KERNELS.get(name, {})
    optimizer_class, options = OPTIMIZERS["AdamW" if more else name]
    model: Any = small_decoder(torch.bfloat16, vocab=BIG_VOCAB).to("cuda")
    with torch.compiler.set_stance("force_eager"), Detector() as found:
        settings = {**options, **more, "stream_bytes": 20_000, "gradients": gradients}
        model, hift = hift_over(model, optimizer_class, **settings)
        for update, batch in enumerate(token_batches(3 * LAYERS, vocab=BIG_VOCAB)):
            on_card = {key: value.to("cuda") for key, value in batch.items()}
            if update == 2 * LAYERS:
                found.waits.clear()
            model(**on_card).loss.backward()
            hift.step()
            hift.zero_grad()
    ours = {line: number for line, number in found.waits.items() if "test_waits.py" not in line.split(" < ")[0]}
    return len(list(model.parameters())), ours


@pytest.mark.parametrize(("name", "gradients"), quick(itertools.product(NEVER_WAITS, PLACES), KEPT))
def test_no_step_of_hift_waits(name: str, gradients: str) -> None:
    assert on_device(waits_of_steps, name, gradients)[1] == {}


@pytest.mark.parametrize("name", quick(WAITS_BY_ITSELF, ["torch Adafactor"]))
def test_others_wait_within_their_own_step_alone(name: str) -> None:
    num_tensors, waits = on_device(waits_of_steps, name, "device")
    assert all(line.startswith("hift/chunk.py") for line in waits), "not in the base optimizer's step"
    assert sum(waits.values()) >= WAITS_BY_ITSELF[name] * num_tensors
