"""Step a base optimizer on dummy weights, to find the form of its state and the bytes that a step needs."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from slivertune.core.layout import world_size
from slivertune.core.ledger import Ledger, claim
from slivertune.core.saved_values import is_finite
from slivertune.core.torch_internals import FakeTensor, can_compile_kernels, is_compilation_disabled
from slivertune.hift import tiled_steps
from slivertune.hift.base import CUT_MULTIPLE, BaseOptimizer
from slivertune.hift.chunk import Weight
from slivertune.hift.compiled_passes import CompiledPasses, compile_passes
from slivertune.hift.config import HiFTConfig
from slivertune.hift.nested_state import Structure, UnsupportedStateError, flatten_state
from slivertune.hift.tiled_steps import FactoredRule, TilePasses, rule_of, unmet
from slivertune.hift.unsupported_optimizers import NEEDS_CLOSURE, refusal

_PROBE_ELEMENTS = 64 * CUT_MULTIPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorForm:
    """Form of a state tensor, whatever the size of its weight."""

    dtype: torch.dtype
    """Dtype of its elements."""
    has_extent: bool
    """Whether it has dimensions."""
    is_finite: bool
    """Whether it holds neither NaN nor infinity."""


def form_of(value: Any) -> TensorForm | type:
    """Return the form of a state tensor, or the type of any other value."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    return TensorForm(dtype=value.dtype, has_extent=value.dim() > 0, is_finite=is_finite(value))


def describe_form(form: TensorForm | type) -> str:
    """Describe a form in the words of an error."""
    if isinstance(form, type):
        return f"a {form.__name__}"
    kind = "tensor" if form.has_extent else "tensor without dimensions"
    return f"a {kind} of {form.dtype}{'' if form.is_finite else ' that holds NaN or infinity'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNeeds:
    """Needs of a step of one weight, beside the weight and its gradient."""

    state_bytes: Mapping[torch.dtype, float]
    """Bytes of state tensors that have dimensions, by dtype."""
    temporary_bytes: float
    """Bytes, at their peak, of tensors that the step allocates and frees."""
    keys: frozenset[str]
    """Keys of all state."""
    forms: Mapping[str, TensorForm | type]
    """Forms of the state that `flatten_state` returns, by key."""
    scalars_on_device: frozenset[str]
    """Keys of state without dimensions that is on the weight's device, not on the host."""


class StepMeter:
    """Measures and remembers the needs of a base optimizer's steps under HiFT's settings.

    Args:
        base: The base optimizer.
        param_groups: Hyperparameters by param group.
        config: HiFT's settings.
    """

    def __init__(self, base: BaseOptimizer, param_groups: Sequence[dict[str, Any]], config: HiFTConfig) -> None:
        self.base = base
        self.config = config
        self.param_groups = param_groups
        """Hyperparameters by param group."""
        self._measured: dict[tuple[Any, ...], StepNeeds] = {}
        self._compiled: set[tuple[Any, ...]] = set()
        """Kinds of tiles whose steps are compiled."""
        self._has_failed = False
        """Whether steps could not be compiled."""

    @property
    def is_elementwise(self) -> bool:
        """Whether a large weight needs the same bytes per element as a small one."""
        return self.base.slicing.unit == "elements"

    def steps_master(self, weight: Weight) -> bool:
        """Return whether a weight is stored in 16 bits and its fp32 master is stepped."""
        return self.config.master == "fp32" and weight.parameter.dtype == torch.bfloat16

    def steps_in_fp32(self, weight: Weight) -> bool:
        """Return whether a weight is stored in 16 bits and a copy of it in fp32 is stepped, a master or not."""
        return self.config.master != "none" and weight.parameter.dtype == torch.bfloat16

    def rule_of(self, weight: Weight) -> FactoredRule | None:
        """Return the rule by which a weight is stepped in tiles, None if it is stepped whole."""
        parameter, rule = weight.parameter, rule_of(self.base.optimizer_class, self._passes_on(weight.device))
        is_whole = self.base.slicing.unit == "tensors"
        is_large = parameter.dim() > 1 and parameter.numel() > tiled_steps.TILE_ELEMENTS
        dtype = torch.float32 if self.steps_in_fp32(weight) else parameter.dtype
        # An offloaded exact weight is loaded contiguous.
        if rule is None or not (is_whole and is_large) or not (parameter.is_contiguous() or weight.is_quantized):
            return None
        return rule if dtype in rule.dtypes and unmet(rule, self.param_groups[weight.param_group]) is None else None

    def steps_copy(self, weight: Weight) -> bool:
        """Return whether a copy of a 16-bit weight in fp32 is stepped. Without a master, tiles need no copy."""
        return self.steps_master(weight) if self.rule_of(weight) is not None else self.steps_in_fp32(weight)

    def is_compiled_on(self, device: torch.device) -> bool:
        """Return whether steps in tiles on a device are compiled."""
        if self.config.compile_step != "auto":
            return self.config.compile_step == "always"
        return not self._has_failed and can_compile_kernels(device) and not is_compilation_disabled()

    def _passes_on(self, device: torch.device) -> TilePasses:
        return CompiledPasses() if self.is_compiled_on(device) else TilePasses()

    def compile_steps(self, weights: Iterable[Weight]) -> None:
        """Compile steps in tiles before the first of them, so that a failure changes nothing.

        Args:
            weights: Weights to step, of which those that are stepped whole need no compilation.

        Raises:
            RuntimeError: If torch can't compile a step, unless one device may step without.
        """
        for weight in weights:
            rule = self.rule_of(weight)
            if rule is None or not isinstance(rule.passes, CompiledPasses) or isinstance(weight.parameter, FakeTensor):
                continue
            if is_compilation_disabled():
                raise RuntimeError(
                    "compile_step='always' compiles steps, and TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is set. "
                    "Unset it, or set compile_step='never'"
                )
            parameter, group = weight.parameter, self.param_groups[weight.param_group]
            dtype = torch.float32 if self.steps_master(weight) else parameter.dtype
            is_rounded = self.config.master == "stochastic" and dtype == torch.bfloat16
            try:
                compile_passes(
                    rule,
                    group,
                    parameter.shape,
                    dtype=dtype,
                    device=weight.device,
                    is_rounded=is_rounded,
                    known=self._compiled,
                )
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        choice = self.config.compile_step
        said = next(iter(str(error).splitlines()), "no message")
        reason = f"torch can't compile steps in tiles ({type(error).__name__}: {said})"
        if choice == "always" or world_size() > 1:
            raise RuntimeError(f"{reason}. Install what it lacks, or set compile_step='never' on all ranks") from error
        warnings.warn(
            f"{reason}. They run uncompiled, in more kernels. compile_step='never' chooses this without a warning",
            stacklevel=2,
        )
        self._has_failed = True

    def needs(self, weight: Weight) -> StepNeeds:
        """Return the needs of a weight, or of its fp32 copy, on its device."""
        if self.rule_of(weight) is not None:
            return self._needs_in_tiles(weight)
        parameter = weight.parameter
        is_sampled = self.is_elementwise and parameter.numel() >= _PROBE_ELEMENTS
        shape = (_PROBE_ELEMENTS,) if is_sampled else tuple(parameter.shape)
        dtype = torch.float32 if self.steps_in_fp32(weight) else parameter.dtype
        sample = self._sample(weight, shape, dtype)
        if not is_sampled:
            return sample
        scale = parameter.numel() / _PROBE_ELEMENTS
        return replace(
            sample,
            state_bytes={dtype: num_bytes * scale for dtype, num_bytes in sample.state_bytes.items()},
            temporary_bytes=sample.temporary_bytes * scale,
        )

    def _needs_in_tiles(self, weight: Weight) -> StepNeeds:
        """Return the needs of a weight that is stepped in tiles, whose whole step may not fit."""
        parameter = weight.parameter
        shape, dtype = (*(1 for _ in parameter.shape[2:]), 3, 2), torch.float32
        of_tile = self._passes_on(weight.device).temporary_bytes(is_rounded=self.config.master == "stochastic")
        num_moments = parameter.numel() // parameter.shape[-1] + parameter.numel() // parameter.shape[-2]
        return replace(
            self._sample(weight, shape, dtype),
            state_bytes={dtype: float(num_moments * dtype.itemsize)},
            # Of a tile, and the factors that are made of the moments.
            temporary_bytes=float(of_tile + num_moments * dtype.itemsize),
        )

    def _sample(self, weight: Weight, shape: tuple[int, ...], dtype: torch.dtype) -> StepNeeds:
        """Return the needs of a tensor of a shape and dtype in the place of a weight. Each is measured once."""
        key = (shape, weight.param_group, dtype, weight.device, self.base.overrides_of(weight.parameter))
        if key not in self._measured:
            with _same_random_numbers(weight.parameter, weight.device), _uncompiled():
                self._measured[key] = self._measure(weight, torch.zeros(shape, dtype=dtype, device=weight.device))
        return self._measured[key]

    def scalars_on_device(self, weight: Weight) -> frozenset[str]:
        """Return the keys of state without dimensions that must return to the device (none on a CPU)."""
        return frozenset() if weight.device.type == "cpu" else self.needs(weight).scalars_on_device

    def _measure(self, stands_for: Weight, zeros: torch.Tensor) -> StepNeeds:
        weight = torch.nn.Parameter(zeros)
        weight.grad = torch.zeros_like(weight)
        group = self.param_groups[stands_for.param_group]
        optimizer = self.base.build([{**group, "params": [weight]}], [(weight, stands_for.parameter)])
        optimizer.step()  # the first step creates the state
        claim(weight, "parameters")
        claim(weight.grad, "gradients")
        flat = flatten_state(optimizer.state[weight])
        state = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
        for tensor in state.values():
            claim(tensor, "state")
        with Ledger() as ledger:
            optimizer.step()
        state_bytes: Counter[torch.dtype] = Counter()
        for tensor in state.values():
            if tensor.dim():
                state_bytes[tensor.dtype] += tensor.nbytes
        return StepNeeds(
            state_bytes=state_bytes,
            temporary_bytes=ledger.highest.residual,
            keys=frozenset(optimizer.state[weight]),
            forms={} if isinstance(weight, FakeTensor) else {key: form_of(value) for key, value in flat.items()},
            scalars_on_device=frozenset(
                key for key, value in state.items() if not value.dim() and value.device == weight.device
            ),
        )


def try_step(base: BaseOptimizer, param_groups: Sequence[dict[str, Any]], weights: Sequence[Weight]) -> None:
    """Step a class that is not listed once, on a dummy weight, to see that HiFT can move its state.

    A failing step is no reason to refuse the class: the dummy may lack something that the model has, such as a GPU. If
    the model lacks it, too, its first step fails with the same error.

    Args:
        base: The base optimizer.
        param_groups: Hyperparameters by param group.
        weights: Weights to train.

    Raises:
        ValueError: If the class needs a closure, keeps tensors that can't be moved, or is declared element-wise with
            state that can't be cut.
    """
    weight = max(weights, key=lambda one: one.parameter.dim())
    parameter = weight.parameter
    if base.slicing.is_listed or parameter.device.type == "meta" or isinstance(parameter, FakeTensor):
        return
    shape = _TRIAL_SHAPE if parameter.dim() > 1 else _TRIAL_SHAPE[:1]
    dummy = torch.nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    dummy.grad = torch.zeros_like(dummy)
    group = param_groups[weight.param_group]
    name = base.optimizer_class.__name__
    with (
        torch.no_grad(),
        _same_random_numbers(parameter, parameter.device),
        _uncompiled(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            optimizer = base.build([{**group, "params": [dummy]}])
            optimizer.step()
        except Exception:
            if _steps_with_closure(base, group, dummy):
                raise refusal(name, NEEDS_CLOSURE.reason, NEEDS_CLOSURE.way_out) from None
            return
    try:
        flat = flatten_state(optimizer.state.get(dummy, {}))
    except UnsupportedStateError as error:
        reason = f"its state {error}, which can't be moved to host memory or to disk"
        raise refusal(name, reason, "Use an optimizer that keeps dense tensors") from error
    cut = [key for key, value in flat.items() if isinstance(value, Structure) and value.is_subclass]
    if cut and base.slicing.unit == "elements":
        raise ValueError(
            f"{name} does not support elementwise=True: its state {cut[0]!r} is a tensor subclass, whose blocks must "
            "stay whole. Leave elementwise out"
        )


_TRIAL_SHAPE = (64, 64)
"""Shape of the dummy. Most optimizers quantise from 4,096 elements on."""


def _steps_with_closure(base: BaseOptimizer, group: dict[str, Any], dummy: torch.nn.Parameter) -> bool:
    """Return whether a failed step works with a closure."""

    def closure() -> Any:
        dummy.grad = torch.zeros_like(dummy)
        return torch.zeros((), dtype=torch.float32, device=dummy.device)

    try:
        base.build([{**group, "params": [dummy]}]).step(closure)
    except Exception:
        return False
    return True


@contextmanager
def _same_random_numbers(parameter: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Restore the random generators, from which stochastic rounding draws. Fake numbers are not drawn."""
    with torch.random.fork_rng(
        [device] if device.type == "cuda" else [], enabled=not isinstance(parameter, FakeTensor)
    ):
        yield


def _uncompiled() -> AbstractContextManager[None]:
    """Run compiled functions eagerly: torch compiles nothing under a ledger, and a dummy is not worth it."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
