"""What a method does not do under a layout: one list, asked before anything is prepared."""

from typing import Any

import bitsandbytes
import pytest
import torch

from slivertune import SFT, HiFT, HiFTConfig, SFTConfig
from slivertune.core.layout import Layout
from tests.helpers.models import tiny_llama

ZERO: tuple[Layout, ...] = ("zero1", "zero2", "zero3")
SHARING: tuple[Layout, ...] = ("fsdp2", *ZERO)
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO", "zero2": "ZeRO", "zero3": "ZeRO"}


def hift(optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **config: Any) -> HiFT:
    return HiFT(tiny_llama(), optimizer_class, config=HiFTConfig(**config), lr=1e-3)


@pytest.mark.parametrize(
    ("config", "way_out"),
    [
        ({"state": "disk"}, 'use state="host", or "device"'),
        ({"state": "discard"}, 'use state="host", or "device"'),
        ({"master": "none"}, 'use master="fp32", or DDP or FSDP2'),
        ({"master": "split"}, 'use master="fp32", or DDP or FSDP2'),
    ],
)
def test_settings_that_mean_nothing_where_an_engine_keeps_the_state(
    config: dict[str, Any], way_out: str, tmp_path: Any
) -> None:
    optimizer = hift(**config, **({"state_dir": tmp_path} if config.get("state") == "disk" else {}))
    for layout in ZERO:
        clash = optimizer.unsupported(layout)
        assert clash is not None and "is not available under ZeRO" in clash and way_out in clash
    assert [optimizer.unsupported(layout) for layout in ("single", "ddp", "fsdp2")] == [None] * 3
    assert [hift(state="device").unsupported(layout) for layout in ZERO] == [None] * 3


@pytest.mark.parametrize("layout", NAMES)
def test_steps_inside_the_backward(layout: Layout) -> None:
    assert hift(step_in_backward=True).unsupported(layout) == (
        "step_in_backward=True updates a tensor before the other ranks' gradients have arrived; under "
        f"{NAMES[layout]}, leave it False"
    )
    assert hift(step_in_backward=True).unsupported("single") is None


@pytest.mark.parametrize(
    ("optimizer_class", "reason", "layouts"),
    [
        (torch.optim.Adafactor, "Adafactor looks at whole tensors", SHARING),
        (bitsandbytes.optim.AdamW8bit, "AdamW8bit keeps its state by blocks of a whole weight", SHARING),
        (torch.optim.Adagrad, "DeepSpeed builds a new Adagrad", ZERO),
    ],
)
def test_optimizers_that_shards_or_engines_would_change(
    optimizer_class: type[torch.optim.Optimizer], reason: str, layouts: tuple[Layout, ...]
) -> None:
    optimizer = hift(optimizer_class)
    refused = {layout: optimizer.unsupported(layout) for layout in ("single", *NAMES)}
    assert {layout for layout, clash in refused.items() if clash is not None} == set(layouts)
    assert all(reason in clash and "use torch.optim.AdamW" in clash for clash in refused.values() if clash is not None)


def test_an_optimizer_that_is_declared_elementwise_passes() -> None:
    class Unknown(torch.optim.SGD):
        """A class that no list knows."""

    assert hift(Unknown).unsupported("zero2") is not None
    assert [hift(Unknown, elementwise=True).unsupported(layout) for layout in NAMES] == [None] * 5


def test_layers_have_to_add_the_deltas_where_weights_are_shared_out() -> None:
    model = tiny_llama()
    optimizer = SFT(model, config=SFTConfig(density=0.1, phi_gradient="chunked"), lr=1e-3, total_steps=4)
    assert [optimizer.unsupported(layout) for layout in ("single", *NAMES)] == [None] * 6
    optimizer.detach(merge=False)

    class Own(torch.nn.Linear):
        """A layer with a product of its own."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) + 0.0

    model.model.layers[1].mlp.up_proj.__class__ = Own
    optimizer = SFT(model, config=SFTConfig(density=0.1), lr=1e-3, total_steps=4)
    refused = {layout: optimizer.unsupported(layout) for layout in ("single", *NAMES)}
    assert {layout for layout, clash in refused.items() if clash is not None} == {"fsdp2", "zero3"}
    for name, clash in (("FSDP2", refused["fsdp2"]), ("ZeRO-3", refused["zero3"])):
        assert clash is not None and clash.startswith(f"{name} shares the weights out")
        assert "model.layers.1.mlp.up_proj.weight belongs to Own" in clash and clash.endswith("or use DDP")
