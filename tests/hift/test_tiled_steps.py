"""Adafactor in tiles of a weight: the whole step's result to rounding, in few operators and little memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.optimization import Adafactor as TransformersAdafactor

from slivertune import HiFT, HiFTConfig
from slivertune.core.ledger import Ledger
from slivertune.hift import compiled_passes, probe, tiled_steps
from slivertune.hift.chunk import Slice
from slivertune.hift.compiled_passes import CompiledPasses
from slivertune.hift.cutting import cut_group
from slivertune.hift.stochastic_rounding import StochasticRounding
from slivertune.hift.tiled_steps import Factors, TilePasses, rule_of, step_in_tiles, unmet
from tests.helpers.models import LAYERS, assert_same_bits, bits, differing, small_decoder, token_batches, weights
from tests.helpers.pairwise import rotated
from tests.helpers.reference import NaiveHiFT, naive_groups, train
from tests.hift.cases import BIG_VOCAB, hift_over, reloaded, run
from tests.hift.test_waiting import NaiveWaiting

BF16, FP32 = torch.bfloat16, torch.float32
NAMED: dict[str, Any] = {"scale_parameter": False, "relative_step": False, "warmup_init": False, "lr": 1e-2}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "transformers": (TransformersAdafactor, NAMED),
    "transformers, other settings": (
        TransformersAdafactor,
        {**NAMED, "weight_decay": 0.1, "clip_threshold": 0.5, "decay_rate": -0.5, "eps": (1e-12, 1e-3)},
    ),
    "torch": (torch.optim.Adafactor, {"lr": 1e-2}),
    "torch, no rate": (torch.optim.Adafactor, {"lr": 0.0, "weight_decay": 0.1}),
    "torch, other settings": (
        torch.optim.Adafactor,
        {"lr": 0.05, "weight_decay": 0.1, "d": 2.0, "eps": (1e-4, 1e-2), "beta2_decay": -0.5},
    ),
}
UPDATES = 6
# Each factor of an update is rounded some ten times, and a mean is summed in another order.
RELATIVE = 64 * 2**-24


@contextmanager
def tiles_of(num_elements: int) -> Iterator[None]:
    with (
        mock.patch.object(tiled_steps, "TILE_ELEMENTS", num_elements),
        mock.patch.object(compiled_passes, "TILE_ELEMENTS", num_elements),
    ):
        yield


class Checked(TilePasses):
    """Passes that check the place of each tile."""

    def write(self, weight: torch.Tensor, gradient: torch.Tensor, factors: Factors, **others: Any) -> None:
        assert weight.storage_offset() == others["start"]  # of a weight with a storage of its own
        super().write(weight, gradient, factors, **others)


def gradients(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Gradients of an update each, one of which is clipped, with a row and a column without any."""
    torch.manual_seed(1)
    found = [torch.randn(shape) * torch.rand(shape[-1]) * (20 if index == 3 else 1e-3) for index in range(UPDATES)]
    for each in found:
        each[..., 2, :] = 0
        each[..., 3] = 0
    return found


@rotated(
    name=list(OPTIMIZERS),
    shape=[(48, 33), (3, 16, 40), (2, 2, 8, 8), (40, 4, 5, 3), (1, 64), (64, 1)],
    tile=[1, 40, 300, 1500, 10**6],
)
def test_tiles_give_the_whole_steps_result(name: str, shape: tuple[int, ...], tile: int) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(shape))
    optimizer = optimizer_class([whole], **options)
    tiled, state, rule = whole.detach().clone(), {}, rule_of(optimizer_class, Checked())
    assert rule is not None
    limit = torch.zeros(shape)
    for gradient in gradients(shape) if min(shape) > 3 else [torch.randn(shape) for _ in range(UPDATES)]:
        before, whole.grad = whole.detach().clone(), gradient.clone()
        optimizer.step()
        with tiles_of(tile), torch.no_grad():
            step_in_tiles(rule, state, optimizer.param_groups[0], tiled, gradient, None)
        moved = (whole.detach() - before).abs()
        limit += RELATIVE * (moved + before.abs())
        assert float(((tiled - whole.detach()).abs() - limit).max()) <= 0
        assert float(moved.max()) > 1e-5 or not options["lr"]
    expected = dict(optimizer.state[whole])
    assert state.keys() == expected.keys()
    for key in state.keys() - {"RMS"}:
        torch.testing.assert_close(torch.as_tensor(state[key]), torch.as_tensor(expected[key]), rtol=1e-5, atol=0)
        assert type(state[key]) is type(expected[key])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["transformers, other settings", "torch, other settings"])
def test_compiled_passes_give_the_result_of_operators(name: str, dtype: torch.dtype) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    group = optimizer_class([torch.nn.Parameter(torch.zeros(2, 2))], **options).param_groups[0]
    for shape in ((48, 33), (3, 16, 40), (9, 16, 16)):
        torch.manual_seed(0)
        stepped, states = (
            list(torch.randn(shape).to(dtype).expand(2, *shape).clone()),
            [dict[str, Any]() for _ in range(2)],
        )
        limit, num_other_way = torch.zeros(shape), 0
        for update, gradient in enumerate(gradients(shape)):
            before = stepped[0].float().clone()
            rounding = StochasticRounding(seed=0, update=update).of("w") if dtype == BF16 else None
            for weight, state, passes in zip(stepped, states, (TilePasses(), CompiledPasses()), strict=True):
                with tiles_of(300):
                    rule = rule_of(optimizer_class, passes)
                    assert rule is not None
                    step_in_tiles(rule, state, group, weight, gradient.to(dtype), rounding)
            limit += RELATIVE * ((stepped[0].float() - before).abs() + before.abs())
            if dtype == FP32:
                assert float(((stepped[1] - stepped[0]).abs() - limit).max()) <= 0
            else:
                # The same bits decide. A value within an fp32 rounding of where they do may go the other way.
                num_other_way += int((stepped[1] != stepped[0]).sum())
                stepped[1].copy_(stepped[0])
        assert num_other_way <= UPDATES * before.numel() * RELATIVE / 2**-8
        for key in states[0].keys() - {"RMS"}:
            found, expected = (torch.as_tensor(each[key], dtype=FP32) for each in states)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def calls_of_passes(shape: tuple[int, int, int]) -> list[Callable[[], object]]:
    """One call of each compiled pass."""
    passes = CompiledPasses()
    weight, gradient = (torch.randn(shape).to(BF16) for _ in range(2))
    factors = Factors(rows=torch.rand(*shape[:2], 1), columns=-torch.rand(shape[0], 1, shape[2]), least=None)
    decay, rounding = passes.number(shape[0] / 8, weight), StochasticRounding(seed=0, update=shape[0]).of("w")
    return [
        partial(passes.norms, gradient, torch.empty(shape[:2])),
        partial(passes.update_norms, gradient, factors),
        partial(passes.write, weight, gradient, factors, decay=decay, rounding=rounding, start=shape[1]),
    ]


def test_each_pass_is_one_graph_of_one_kernel_for_all_sizes() -> None:
    for call in calls_of_passes((3, 5, 7)):
        _, graphs = run_and_get_code(call)
        assert [each.count("async_compile.cpp_pybinding(") for each in graphs] == [1]
    for call in calls_of_passes((3, 5, 7)):
        call()
    torch._dynamo.utils.counters.clear()
    for shape in ((9, 12, 4), (4, 4, 4)):
        for call in calls_of_passes(shape):
            call()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


class Operators(TorchDispatchMode):
    """Counts operators that compute, their largest result, and accesses to some storages."""

    def __init__(self, **watched: torch.Tensor) -> None:
        super().__init__()
        self.names = {each.untyped_storage()._cdata: name for name, each in watched.items()}
        self.accesses: Counter[str] = Counter()
        self.num = self.largest = self.with_two_kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name in ("aten::detach", "aten::empty", "aten::new_empty"):
            return result
        self.num += 1
        self.with_two_kernels += func._schema.name == "slivertune::tile_norms"
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
        own = {each.untyped_storage()._cdata for each in given}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in own:
                self.largest = max(self.largest, each.nbytes)
        is_read = not func._schema.name.startswith("aten::new_")  # these take no more than a dtype and a device
        for argument, value in zip(func._schema.arguments, args if is_read else (), strict=False):
            if isinstance(value, torch.Tensor) and (name := self.names.get(value.untyped_storage()._cdata)) is not None:
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                self.accesses[f"{name} written" if is_written else f"{name} read"] += value.numel()
                if is_written and func._schema.name == "slivertune::tile_write":
                    self.accesses[f"{name} read"] += value.numel()
        return result


@pytest.mark.parametrize(
    ("name", "weight_reads"), [("transformers", 1), ("transformers, other settings", 1), ("torch", 2)]
)
@pytest.mark.parametrize("shape", [(16384, 4096), (16, 2048, 2048), (64, 1024, 1024), (1024, 4096, 4, 4)], ids=str)
@pytest.mark.parametrize(
    ("passes", "most"), [(TilePasses(), 400), (CompiledPasses(), 60)], ids=["operators", "compiled"]
)
def test_a_step_takes_few_kernels_each_on_a_tile_and_reads_the_gradient_three_times(
    name: str, weight_reads: int, shape: tuple[int, ...], passes: TilePasses, most: int
) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    weight, gradient = (torch.empty(shape, dtype=BF16, device="meta") for _ in range(2))
    assert weight.numel() == 2**26
    group = optimizer_class([torch.nn.Parameter(torch.zeros(2, 2))], **options).param_groups[0]
    rule = rule_of(optimizer_class, passes)
    first, second = (StochasticRounding(seed=0, update=each).of("w") for each in range(2))
    assert rule is not None
    state: dict[str, Any] = {}
    step_in_tiles(rule, state, group, weight, gradient, first)
    with Operators(gradient=gradient, weight=weight) as counted:
        step_in_tiles(rule, state, group, weight, gradient, second)
    is_convolution = len(shape) == 4  # the moments of its rows are a quarter of its size
    assert is_convolution or counted.largest <= 72 * 10**6 // 4  # a quarter of a 4090's L2
    assert counted.num + counted.with_two_kernels <= most
    expected = {"gradient read": 3, "weight read": weight_reads, "weight written": 1}
    assert {key: count / 2**26 for key, count in counted.accesses.items()} == expected


PLACES: dict[str, dict[str, Any]] = {
    "stepped, on the device": {"gradients": "stepped", "state": "device"},
    "stepped, on the host": {"gradients": "stepped"},
    "on the device": {"state": "device"},
    "on the host, a chunk of many": {},
    "gradients on the host": {"gradients": "host"},
    "waiting": {"waiting": "int8"},
    "on disk": {"state": "disk"},
}


def slices_of(hift: HiFT) -> list[Slice]:
    return [one for each in hift.turns.states for piece in each.chunks for one in piece.slices]


BATCHES = token_batches(2 * LAYERS, vocab=BIG_VOCAB)
MASTERS = {"fp32 weights": (FP32, "fp32"), "fp32 masters": (BF16, "fp32"), "stochastic": (BF16, "stochastic")}


def in_tiles(optimizer_class: Any, passes: TilePasses | None = None) -> Any:
    """A plain optimizer that steps large weights in tiles."""
    passes = passes or TilePasses()

    class InTiles(optimizer_class):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            large = [
                (group, each, each.grad)
                for group in self.param_groups
                for each in group["params"]
                if each.grad is not None and each.dim() > 1 and each.numel() > tiled_steps.TILE_ELEMENTS
            ]
            for _, each, _ in large:
                each.grad = None
            super().step()
            rule = rule_of(optimizer_class, passes)
            assert rule is not None
            with torch.no_grad():
                for group, each, gradient in large:
                    step_in_tiles(rule, self.state[each], group, each.data, gradient, None)

    return InTiles


@rotated(name=list(OPTIMIZERS), place=list(PLACES), master=list(MASTERS))
def test_weights_are_those_of_a_plain_optimizer_in_tiles_wherever_state_and_gradients_are(
    name: str, place: str, master: str, tmp_path: Path
) -> None:
    dtype, kind = MASTERS[master]
    optimizer_class, options = OPTIMIZERS[name]
    settings = {**PLACES[place], **({"state_dir": tmp_path} if place == "on disk" else {})}
    model, dense = (small_decoder(dtype, vocab=BIG_VOCAB) for _ in range(2))
    before = weights(dense)
    with tiles_of(300):
        _, hift = hift_over(model, optimizer_class, master=kind, **settings, **options)
        made: Any = NaiveHiFT if place != "waiting" else partial(NaiveWaiting, form="int8")
        naive = made(dense, in_tiles(optimizer_class), groups=naive_groups(dense, 1), master=kind, **options)
        assert train(model, hift, BATCHES, 2 * LAYERS) == train(dense, naive, BATCHES, 2 * LAYERS)
    found, expected = model.state_dict(), getattr(naive, "exact", naive.parameters)
    assert [key for key, value in expected.items() if not torch.equal(bits(found[key] + 0), bits(value + 0))] == []
    assert sum(one.rule is not None for one in slices_of(hift)) > LAYERS
    assert len(differing(weights(dense), before)) > LAYERS or not options["lr"]


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("tile", [64, 300])
def test_a_run_that_is_resumed_has_the_same_bits(master: str, tile: int, tmp_path: Path) -> None:
    dtype, kind = MASTERS[master]
    with tiles_of(tile):
        made = [small_decoder(dtype, vocab=BIG_VOCAB, seed=seed) for seed in (0, 9)]
        (model, hift), (other, resumed) = (
            hift_over(each, TransformersAdafactor, gradients="stepped", state="device", master=kind, **NAMED)
            for each in made
        )
        run(model, hift, LAYERS + 1)
        saved = reloaded([model.state_dict(), hift.state_dict()])
        losses = run(model, hift, LAYERS, start=LAYERS + 1)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert run(other, resumed, LAYERS, start=LAYERS + 1) == losses
    assert_same_bits(model, other)


def test_weights_in_tiles_take_no_room_for_copies_in_their_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "compile_passes", lambda *args, **kwargs: None)
    settings: dict[str, Any] = {"layers_per_group": LAYERS, "stream_bytes": 30_000, "compile_step": "always", **NAMED}
    num_chunks = []
    with tiles_of(8):
        for master in ("none", "stochastic", "fp32"):
            _, hift = hift_over(small_decoder(BF16), TransformersAdafactor, master=master, **settings)
            chunks = cut_group(hift.turns.states[0].weights, hift._meter, {})
            num_chunks.append(len(chunks))
            assert all(one.rule is not None for each in chunks for one in each.slices if one.weight.parameter.dim() > 1)
    assert num_chunks[0] == num_chunks[1] < num_chunks[2]


def test_settings_that_tiles_do_not_have_are_refused_after_the_first_step() -> None:
    with tiles_of(300):
        model, hift = hift_over(small_decoder(), TransformersAdafactor, layers_per_group=LAYERS, **NAMED)
        run(model, hift, 1)
        before = weights(model)
        hift.param_groups[0]["scale_parameter"] = True
        with pytest.raises(ValueError, match=r"=True was set after the first step, and .* needs scale_parameter=False"):
            run(model, hift, 1, start=1)
        assert differing(weights(model), before) == [] and all(each.grad is not None for each in model.parameters())
        hift.param_groups[0]["scale_parameter"] = False
        hift.step()
        other, never_refused = hift_over(small_decoder(), TransformersAdafactor, layers_per_group=LAYERS, **NAMED)
        run(other, never_refused, 2)
    assert_same_bits(model, other)


class OfUser(torch.optim.Adafactor):
    pass


@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [
        (TransformersAdafactor, {**NAMED, "scale_parameter": True}),
        (TransformersAdafactor, {**NAMED, "beta1": 0.9}),
        (torch.optim.Adafactor, {"maximize": True}),
        (torch.optim.Adafactor, {"master": "none"}),
        (OfUser, {}),
    ],
    ids=str,
)
def test_other_settings_step_whole_tensors(optimizer_class: Any, settings: dict[str, Any]) -> None:
    dtype = BF16 if "master" in settings else FP32
    with tiles_of(300):
        models = [
            hift_over(small_decoder(dtype), optimizer_class, layers_per_group=LAYERS, **settings) for _ in range(2)
        ]
        run(*models[0], 2)
    with tiles_of(10**9):
        run(*models[1], 2)
    assert_same_bits(models[0][0], models[1][0])


def test_a_weight_in_another_order_of_memory_is_stepped_whole() -> None:
    made = [small_decoder() for _ in range(2)]
    for each in (each for model in made for each in model.parameters() if each.dim() == 2):
        each.data = each.data.t().contiguous().t()
    with tiles_of(300):
        hifts = [hift_over(model, TransformersAdafactor, layers_per_group=LAYERS, **NAMED) for model in made]
        run(*hifts[0], 2)
        assert [one.weight.name for one in slices_of(hifts[0][1]) if one.rule is not None] == []
    with tiles_of(10**9):
        run(*hifts[1], 2)
    assert_same_bits(*made)


def test_a_rate_on_another_device_would_be_read_there() -> None:
    rule, group = rule_of(torch.optim.Adafactor, TilePasses()), {"maximize": False, "lr": torch.ones((), device="meta")}
    assert rule is not None and unmet(rule, group) == "lr"
    assert unmet(rule, {**group, "lr": torch.ones(())}) is None


@pytest.mark.parametrize(
    ("tile", "compile_step", "passes"),
    [(300, "auto", TilePasses()), (10**6, "auto", TilePasses()), (300, "always", CompiledPasses())],
    ids=["many tiles", "one tile", "compiled"],
)
def test_all_layers_train_as_by_a_plain_optimizer_with_nothing_on_the_host(
    tile: int, compile_step: Any, passes: TilePasses
) -> None:
    model, dense = (small_decoder(BF16, vocab=BIG_VOCAB) for _ in range(2))
    groups = [[name for group in naive_groups(dense, 1) for name in group]]
    with tiles_of(tile), Ledger() as ledger:
        config = HiFTConfig.all_layers(compile_step=compile_step)
        hift = HiFT(model, TransformersAdafactor, config=config, **NAMED)
        losses = train(model, hift, BATCHES, LAYERS)
        most = ledger.highest
    with tiles_of(tile):
        plain = in_tiles(TransformersAdafactor, passes)
        naive = NaiveHiFT(dense, plain, groups=groups, master="stochastic", **NAMED)
        assert train(dense, naive, BATCHES, LAYERS) == losses
    assert_same_bits(model, dense)
    assert (most.host, most.disk) == (0, 0)
    # Rows and columns of matrices, and vectors whole.
    sizes = [sum(each.shape) if each.dim() > 1 else each.numel() for each in model.parameters()]
    assert 4 * sum(sizes) <= most.state <= 4 * sum(sizes) + 8 * len(sizes)


@pytest.mark.parametrize("tile", [300, 5000])
@pytest.mark.parametrize("name", ["transformers", "torch"])
def test_steps_take_the_code_that_was_compiled_when_hift_was_built(name: str, tile: int) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    model, master = small_decoder(BF16, vocab=BIG_VOCAB), {"transformers": "stochastic", "torch": "fp32"}[name]
    torch._dynamo.reset()
    with tiles_of(tile), mock.patch.object(tiled_steps, "TILE_ELEMENTS", 300):
        settings: dict[str, Any] = {"layers_per_group": LAYERS, "gradients": "stepped", "compile_step": "always"}
        _, hift = hift_over(model, optimizer_class, master=master, **settings, **options)
        torch._dynamo.utils.counters.clear()
        train(model, hift, BATCHES, 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert any(one.rule is not None for one in slices_of(hift))


@pytest.mark.parametrize(
    ("choice", "num_ranks", "is_refused"), [("auto", 1, False), ("auto", 2, True), ("always", 1, True)], ids=str
)
def test_a_step_that_can_not_be_compiled_changes_nothing_and_is_told(
    choice: Any, num_ranks: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no compiler")

    settings: dict[str, Any] = {"layers_per_group": LAYERS, **NAMED}
    with tiles_of(300):
        never = hift_over(small_decoder(), TransformersAdafactor, compile_step="never", **settings)
        run(*never, 2)
        monkeypatch.setattr(probe, "can_compile_kernels", lambda device: True)
        monkeypatch.setattr(probe, "compile_passes", fail)
        monkeypatch.setattr(probe, "world_size", lambda: num_ranks)
        model = small_decoder()
        if is_refused:
            with pytest.raises(RuntimeError, match=r"can't compile .*no compiler.*compile_step='never' on all ranks"):
                hift_over(model, TransformersAdafactor, compile_step=choice, **settings)
            hift_over(model, TransformersAdafactor, compile_step="never", **settings)  # nothing is left attached
            return
        with pytest.warns(UserWarning, match="no compiler.*They run uncompiled"):
            failed = hift_over(model, TransformersAdafactor, compile_step=choice, **settings)
        run(*failed, 2)
    assert_same_bits(never[0], model)


def test_a_compilation_that_the_environment_disables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "can_compile_kernels", lambda device: True)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with tiles_of(300):
        with pytest.raises(RuntimeError, match=r"TORCHDYNAMO_DISABLE is set. Unset it, or set compile_step='never'"):
            hift_over(small_decoder(), TransformersAdafactor, compile_step="always", **NAMED)
        assert not hift_over(small_decoder(), TransformersAdafactor, **NAMED)[1].turns.compiles_steps


@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_a_compiled_step_of_training_has_compiled_passes(stance: str) -> None:
    batch = token_batches(1)[0]
    settings: dict[str, Any] = {"layers_per_group": LAYERS, "state": "device", "compile_step": "always", **NAMED}
    models = [small_decoder() for _ in range(2)]
    with tiles_of(300):
        for model, is_compiled in zip(models, (False, True), strict=True):
            _, hift = hift_over(model, TransformersAdafactor, **settings)

            def step(model: Any = model, hift: HiFT = hift) -> None:
                model(**batch).loss.backward()
                hift.step()

            step()  # the first one measures what steps need
            with torch.compiler.set_stance(stance):
                (torch.compile(step, backend="eager") if is_compiled else step)()
    assert_same_bits(*models)
