"""`slivertune.prepare`: layouts, their adapters, what they refuse; and a method on ranks that nothing has prepared."""

import gc
import inspect
import itertools
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

import slivertune
from slivertune import SFT, HiFT, HiFTConfig, SFTConfig
from slivertune.core.layout import Layout
from slivertune.core.sliver import Sliver
from slivertune.parallel import adapters
from slivertune.parallel.adapters import EngineAdapter, LayoutAdapter, adapter_of, engine_adapter_of, register_adapters
from slivertune.parallel.layout import layout_of
from tests.helpers.models import assert_same_bits, differing, tiny_llama, token_batches, weights
from tests.helpers.ranks import quick, run_ranks
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import ZERO, Case, accelerator_of, message_of, running
from tests.parallel.contract.sft import SFTCase
from tests.parallel.reference import ADAMW, batch_of, on_ranks

LAYOUTS: list[Layout] = [layout for layout in get_args(Layout) if layout != "single"]
METHODS: dict[str, Case] = {"HiFT": HiFTCase(), "SFT": SFTCase(model="llama", density=0.1)}


def hift(optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **config: Any) -> HiFT:
    dtype = torch.bfloat16 if config.get("master") == "stochastic" else torch.float32
    return HiFT(tiny_llama(dtype), optimizer_class, config=HiFTConfig.paper(**config), lr=1e-3)


def model_and_hift(**options: Any) -> tuple[Any, HiFT]:
    model = tiny_llama()
    return model, HiFT(model, torch.optim.AdamW, **{"config": HiFTConfig.paper(), **ADAMW, **options})


def step(model: nn.Module, optimizer: Any, count: int = 1) -> None:
    for batch in token_batches(count):
        model(**batch).loss.backward()
        optimizer.step()


def pretended(distributed_type: str, **plugins: Any) -> Any:
    """What `layout_of` reads of an Accelerator."""
    return SimpleNamespace(
        distributed_type=SimpleNamespace(value=distributed_type),
        num_processes=plugins.pop("num_processes", 2),
        state=SimpleNamespace(**plugins),
    )


@pytest.mark.parametrize(
    ("accelerator", "layout"),
    [
        (pretended("NO"), "single"),
        (pretended("MULTI_GPU"), "ddp"),
        (pretended("MULTI_CPU"), "ddp"),
        (pretended("FSDP", fsdp_plugin=SimpleNamespace(fsdp_version=2)), "fsdp2"),
        *((pretended("DEEPSPEED", deepspeed_plugin=SimpleNamespace(zero_stage=n)), f"zero{n}") for n in (1, 2, 3)),
    ],
)
def test_a_layout_is_known_by_its_name(accelerator: Any, layout: str) -> None:
    assert layout_of(accelerator) == layout


@pytest.mark.parametrize(
    ("accelerator", "way_out"),
    [
        (pretended("FSDP", fsdp_plugin=SimpleNamespace(fsdp_version=1)), "Set fsdp_version to 2"),
        (pretended("MEGATRON_LM"), r"does not run under MEGATRON_LM\. Use DDP, FSDP2 or DeepSpeed"),
        (pretended("DEEPSPEED", deepspeed_plugin=SimpleNamespace(zero_stage=0)), "Use stage 1, 2 or 3, or DDP"),
        (
            pretended("DEEPSPEED", num_processes=1, deepspeed_plugin=SimpleNamespace(zero_stage=0)),
            "leave DeepSpeed out on one device",
        ),
    ],
)
def test_a_layout_without_an_integration_is_refused_with_what_to_use(accelerator: Any, way_out: str) -> None:
    with pytest.raises(ValueError, match=way_out):
        layout_of(accelerator)


def test_on_one_device_prepare_is_the_accelerators_own() -> None:
    results = []
    for prepare in (slivertune.prepare, Accelerator.prepare):
        accelerator, (plain, built) = Accelerator(cpu=True), model_and_hift()
        model, optimizer = prepare(accelerator, plain, built)
        assert model is plain and type(optimizer) is AcceleratedOptimizer and optimizer.optimizer is built
        for update in range(3):
            accelerator.backward(model(**batch_of(update, 0, 0)).loss)
            optimizer.step()
            optimizer.zero_grad()
        results.append(model)
    assert_same_bits(*results)


def test_what_slivertune_did_not_make_goes_to_the_accelerator() -> None:
    model = tiny_llama()
    adamw = torch.optim.AdamW(model.parameters())
    assert slivertune.prepare(Accelerator(cpu=True), model, adamw)[1].optimizer is adamw


def test_an_optimizer_without_its_model_is_refused_on_several_ranks() -> None:
    with pytest.raises(ValueError, match=r"0 models and 1 slivertune optimizers were passed\. Under ddp, prepare"):
        slivertune.prepare(pretended("MULTI_CPU"), hift())


@pytest.mark.parametrize("case", METHODS.values(), ids=METHODS)
def test_an_optimizer_that_has_stepped_or_is_of_another_model_is_refused_on_several_ranks(case: Case) -> None:
    model = case.build_model()
    optimizer = case.build_optimizer(model)
    with pytest.raises(ValueError, match=r"another model than the one that was passed\. Build it over this model"):
        slivertune.prepare(pretended("MULTI_CPU"), case.build_model(), optimizer)
    optimizer.check_built_over(model)
    step(model, optimizer)
    with pytest.raises(RuntimeError, match=r"has already made 1 updates\. Prepare it before its first step"):
        slivertune.prepare(pretended("MULTI_CPU"), model, optimizer)


def of_method(kind: type[Sliver]) -> Sliver:
    return object.__new__(kind)


def kinds_of_arguments(function: Any) -> list[Any]:
    return [each.kind for name, each in inspect.signature(function).parameters.items() if name != "self"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [HiFT, SFT])
def test_every_method_has_an_adapter_of_every_layout(kind: type[Sliver], layout: Layout) -> None:
    if layout in ZERO:
        pytest.importorskip("deepspeed")
        made = engine_adapter_of(of_method(kind), layout).initialize
        assert kinds_of_arguments(made) == kinds_of_arguments(EngineAdapter.initialize)
    adapter = adapter_of(of_method(kind), layout)
    assert kinds_of_arguments(adapter.prepare) == kinds_of_arguments(LayoutAdapter.prepare)
    assert adapter.__name__.split(".")[-2:] == [re.sub(r"(?<=zero)\d", "", layout), kind.method]  # type: ignore[attr-defined]


class Another(HiFT):
    method = "another"


def test_a_method_of_another_package_trains_under_the_layouts_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_adapters", dict(adapters._adapters))
    module = ModuleType("another_ddp")
    monkeypatch.setitem(sys.modules, "another_ddp", module)
    with pytest.raises(ValueError, match=r"Another does not train under ddp\. Train on one device$"):
        adapter_of(of_method(Another), "ddp")
    register_adapters("another", ddp="another_ddp")
    assert adapter_of(of_method(Another), "ddp") is module
    with pytest.raises(ValueError, match=r"Another does not train under zero2\. Train on one device or under ddp$"):
        adapter_of(of_method(Another), "zero2")


# What a method does not do under a layout: one list, asked before anything is prepared.
SHARING: tuple[Layout, ...] = ("fsdp2", *ZERO)
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO", "zero2": "ZeRO", "zero3": "ZeRO"}


def refusals(optimizer: Sliver) -> dict[str, str]:
    """By layout, what the method does not do there."""
    said = {layout: optimizer.unsupported(layout) for layout in ("single", *LAYOUTS)}
    return {layout: clash for layout, clash in said.items() if clash is not None}


@pytest.mark.parametrize(
    ("config", "way_out"),
    [
        ({"state": "disk"}, 'Use state="host", or "device"'),
        ({"state": "discard"}, 'Use state="host", or "device"'),
        ({"master": "none"}, 'Use master="fp32", or DDP or FSDP2'),
        ({"master": "stochastic"}, 'Use master="fp32", or DDP or FSDP2'),
    ],
)
def test_settings_that_mean_nothing_where_an_engine_keeps_the_state(
    config: dict[str, Any], way_out: str, tmp_path: Path
) -> None:
    found = refusals(hift(**config, **({"state_dir": tmp_path} if config.get("state") == "disk" else {})))
    assert found.keys() == set(ZERO)
    assert all("is not available under ZeRO" in clash and way_out in clash for clash in found.values())
    assert refusals(hift(state="device")) == {}


def test_stochastic_rounding_of_weights_that_accelerate_would_cast_to_fp32() -> None:
    accelerator = pretended("FSDP", fsdp_plugin=SimpleNamespace(fsdp_version=2))
    accelerator.mixed_precision = "bf16"
    optimizer = hift(master="stochastic")
    with pytest.raises(ValueError, match=r"mixed_precision='bf16' accelerate casts .* Set mixed_precision='no'"):
        adapter_of(optimizer, "fsdp2").prepare(accelerator, nn.Linear(1, 1), optimizer, ())


def test_memory_beside_files_that_a_rank_does_not_have(tmp_path: Path) -> None:
    found = refusals(hift(state="disk", state_dir=tmp_path, state_ram_bytes=1000))
    assert found.keys() == {"fsdp2", *ZERO}
    assert all("state_ram_bytes=1000" in clash and "Leave it out" in clash for clash in found.values())


def test_gradients_that_do_not_stay() -> None:
    found = refusals(hift(gradients="stepped"))
    assert found.keys() == set(LAYOUTS) - {"ddp"}
    for layout, text in found.items():
        assert f"and {NAMES[layout]} shards their gradients. Set gradients='device', or use DDP" in text
    found = refusals(hift(gradients="host"))
    assert found.keys() == set(LAYOUTS) - {"ddp"}
    assert all("gradients='host' is not available under" in text for text in found.values())


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
    found = refusals(hift(optimizer_class))
    assert found.keys() == set(layouts)
    assert all(reason in clash and "Use torch.optim.AdamW" in clash for clash in found.values())


def test_an_optimizer_that_is_declared_elementwise_passes() -> None:
    class Unknown(torch.optim.SGD):
        """A class that no list knows."""

    assert "zero2" in refusals(hift(Unknown)) and refusals(hift(Unknown, elementwise=True)) == {}


def test_layers_have_to_add_the_deltas_where_weights_are_shared_out() -> None:
    model = tiny_llama()
    optimizer = SFT(model, config=SFTConfig(density=0.1, phi_gradient="chunked"), lr=1e-3, total_steps=4)
    assert refusals(optimizer) == {}
    optimizer.detach(merge=False)

    class Own(nn.Linear):
        """A layer with a product of its own."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) + 0.0

    model.model.layers[1].mlp.up_proj.__class__ = Own
    found = refusals(SFT(model, config=SFTConfig(density=0.1), lr=1e-3, total_steps=4))
    assert found.keys() == {"fsdp2", "zero3"}
    for name, clash in (("FSDP2", found["fsdp2"]), ("ZeRO-3", found["zero3"])):
        assert clash.startswith(f"{name} shards the weights") and clash.endswith("or use DDP")
        assert "model.layers.1.mlp.up_proj.weight belongs to Own" in clash


# A method on ranks that nothing has prepared, and in the hands of an engine or of a checkpoint that is not whole.
WAYS: dict[str, Callable[[Any, nn.Module, Any], tuple[nn.Module, Any]]] = {
    "alone": lambda accelerator, model, optimizer: (model, optimizer),
    "plain": lambda accelerator, model, optimizer: (nn.parallel.DistributedDataParallel(model), optimizer),
    "accelerator.prepare": lambda accelerator, model, optimizer: accelerator.prepare(model, optimizer),
}
UNPREPARED = {"HiFT": "HiFT runs on 2 ranks", "SFT": "2 ranks train with SFT, and nothing averages their gradients"}


def step_unprepared(rank: int, num_ranks: int, method: str, way: str) -> tuple[str, int]:
    """What is said, and how many updates were made."""
    model = METHODS[method].build_model()
    built = METHODS[method].build_optimizer(model)
    with on_ranks() as accelerator:
        wrapped, optimizer = WAYS[way](accelerator, model, built)
        return message_of(lambda: step(wrapped, optimizer)), built.updates


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_on_ranks_that_were_not_prepared_names_what_to_call(method: str, way: str) -> None:
    for message, updates in run_ranks(step_unprepared, 2, method, way):
        assert message.startswith(f"RuntimeError: {UNPREPARED[method]}")
        assert all(f"slivertune.{name}" in message for name in ("prepare", "initialize", "attach")), message
        assert updates == 0


def trained_and_dropped(rank: int, num_ranks: int, method: str, layout: Layout) -> list[bool]:
    """Whether the model and the optimizer are gone after a training, for each of two trainings."""
    case = METHODS[method]
    found = []

    def train(accelerator: Any) -> list[Callable[[], object]]:
        model = case.build_model()
        optimizer = case.build_optimizer(model)
        gone: list[Callable[[], object]] = [weakref.ref(model), weakref.ref(optimizer)]
        prepared, wrapped = slivertune.prepare(accelerator, model, optimizer)
        accelerator.backward(case.loss(prepared, case.batch(0, 0, rank)))
        wrapped.step()
        accelerator.free_memory()
        return gone

    with accelerator_of(layout, case) as accelerator:
        for _ in range(2):
            gone = train(accelerator)
            gc.collect()
            found += [each() is None for each in gone]
    return found


@pytest.mark.parametrize(
    ("method", "layout"),
    quick(
        itertools.product(METHODS, ("ddp", "fsdp2", "zero1", "zero2")),
        [("HiFT", "ddp"), ("HiFT", "fsdp2"), ("SFT", "ddp"), ("SFT", "fsdp2"), ("SFT", "zero2")],
    ),
)
def test_an_accelerator_that_has_freed_its_memory_keeps_no_training(method: str, layout: Layout) -> None:
    assert run_ranks(trained_and_dropped, 2, method, layout) == [[True] * 4] * 2


def train_again(rank: int, num_ranks: int) -> dict[str, Any]:
    """Two trainings of one model, each forgotten when it ends; then the ranks go on with it by themselves."""
    model = tiny_llama()
    with on_ranks() as accelerator:
        for _ in range(2):
            optimizer = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), **ADAMW)
            prepared, wrapped = slivertune.prepare(accelerator, model, optimizer)
            accelerator.backward(prepared(**batch_of(0, 0, rank)).loss)
            wrapped.step()
            accelerator.free_memory()
            del optimizer, prepared, wrapped
            gc.collect()
        trained = weights(model)
        model.lm_head.weight.data += rank
        accelerator.end_training()
    return {"weights": trained, "hooks": [*model._forward_hooks.values(), *model._forward_pre_hooks.values()]}


def test_a_training_that_was_dropped_neither_stops_the_next_nor_is_compared() -> None:
    first, second = run_ranks(train_again, 2)
    assert differing(first["weights"], second["weights"]) == first["hooks"] == []


def prepare_twice(rank: int, num_ranks: int, method: str, layout: Layout, is_bare: bool) -> tuple[str, int]:
    """Return the error of the second call, and the updates that the objects of the first make then."""
    with running(replace(METHODS[method], bare=is_bare), layout, rank) as run:
        prepare = partial(slivertune.prepare, run.accelerator, run.plain, run.sliver)
        config = run.case.engine_config(2) if is_bare else None
        initialize = partial(slivertune.initialize, model=run.plain, optimizer=run.sliver, config=config)
        said = message_of(initialize if is_bare else prepare)
        run.train(0, 2)
        return said, run.sliver.updates


@pytest.mark.parametrize(("layout", "is_bare"), [("fsdp2", False), ("zero2", False), ("zero2", True)])
@pytest.mark.parametrize("method", METHODS)
def test_a_second_preparation_is_refused_and_the_first_remains(method: str, layout: Layout, is_bare: bool) -> None:
    for said, updates in run_ranks(prepare_twice, 2, method, layout, is_bare):
        assert said.startswith(f"RuntimeError: the {method} and its model are prepared for {layout} already")
        assert "Train with the objects that the first call returned" in said
        assert updates == 2


def test_one_process_needs_no_preparation() -> None:
    assert not dist.is_initialized()
    model, optimizer = model_and_hift()
    step(model, optimizer)
    assert optimizer.updates == 1 and not optimizer.uses_sidecar


def test_what_an_engine_steps_refuses_to_step_by_itself() -> None:
    model, optimizer = model_and_hift()
    optimizer.delegate_to("DeepSpeed's ZeRO-2")
    assert all(parameter.requires_grad for parameter in model.parameters())
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({"hift": {}})):
        with pytest.raises(RuntimeError, match="DeepSpeed's ZeRO-2 steps in HiFT's place"):
            call()
    names = dict(model.named_parameters()).keys()
    model(**token_batches(1)[0]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "hooks were left behind"
    assert dict(model.named_parameters()).keys() == names


def test_a_placeholder_alone_does_not_resume_a_run() -> None:
    model, saver = model_and_hift()
    saver.use_sidecar("DDP")
    step(model, saver, 3)
    saved, whole = saver.state_dict(), saver.whole_state()
    assert saver._updates_in_placeholder(saved) == 3 and saver._updates_in_placeholder(whole) is None

    again, resumed = model_and_hift(lr=5.0)
    resumed.use_sidecar("DDP")
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == ADAMW["lr"]
    with pytest.raises(RuntimeError, match=r"made after 3 updates, but HiFT's own state, .*, after 0\. Load the whole"):
        step(again, resumed)
    assert resumed.updates == 0
    resumed.load_whole_state(whole)
    step(again, resumed)
    assert resumed.updates == 4


def test_a_state_that_is_no_placeholder_is_not_taken_for_one() -> None:
    model, optimizer = model_and_hift()
    assert optimizer._updates_in_placeholder({"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": []}) is None
    optimizer.use_sidecar("DDP")
    step(model, optimizer, 4)
    placeholder = optimizer.state_dict()
    assert optimizer._updates_in_placeholder(placeholder) == 4
    optimizer.load_state_dict(placeholder)
    step(model, optimizer, 2)  # only the first step after a load is held against it
    assert optimizer.updates == 6
