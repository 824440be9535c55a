"""Settings of HiFT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, get_args

from slivertune.core.options import Bytes, BytesOrAuto, Spelling
from slivertune.core.removed_settings import refuse_removed
from slivertune.core.setting_checks import (
    check_choice,
    check_flag,
    check_integer,
    check_layers_per_group,
    check_number,
    layers_or_auto,
    read_bytes,
)
from slivertune.parked.forms import CodesForm, WeightPlace

Order = Literal["bottom2up", "top2down", "random"]
StatePlace = Literal["host", "device", "disk", "discard"]
MasterKind = Literal["fp32", "none", "stochastic"]
GradientPlace = Literal["device", "host", "stepped"]
CompileChoice = Literal["auto", "always", "never"]
InactiveLayers = Literal["frozen", "above"]
LayersPerGroup = Annotated[float | Literal["all", "auto"], Spelling(value_name="N|SHARE|all|auto", read=layers_or_auto)]

ALL_LAYERS: Mapping[str, Any] = MappingProxyType(
    {
        "layers_per_group": "all",
        "steps_per_group": 1,
        "gradients": "stepped",
        "state": "device",
        "master": "stochastic",
    }
)
"""Settings that train all layers in each update, with nothing offloaded (`HiFTConfig.all_layers`)."""
LEAST_DEVICE_BYTES = 2**14
"""Smallest `device_bytes`."""
CHUNKS_IN_BUDGET = 8
"""Chunks of the largest size that fit into `device_bytes`. Two pass at a time."""
_SIZES = {
    "device_bytes": True,
    "stream_bytes": False,
    "state_ram_bytes": False,
    "prefetch_bytes": True,
    "resident_bytes": True,
}
"""Fields that are sizes, and whether each may be "auto"."""


@refuse_removed
@dataclass(frozen=True, kw_only=True, slots=True)
class HiFTConfig:
    """Settings of HiFT (arXiv 2401.15207), with the paper's symbols in parentheses.

    At 512 and 4,096 tokens per update the default schedule had less loss than half of the layers in equal planned
    time, at 32,768 more (docs/evidence.md, reasons for the defaults). `HiFTConfig.paper()` has the paper's schedule.

    Raises:
        ValueError: If a value is outside the range that its field documents.

    Example:
        >>> config = HiFTConfig(layers_per_group=4, steps_per_group=20, order="random")
        >>> optimizer = HiFT(model, torch.optim.AdamW, config=config, lr=2e-5)
    """

    layers_per_group: LayersPerGroup = 0.25
    """Layers per group, trained in one update (m in the paper): a number, a share of the layers, rounded up, or all.
    `auto` (one GPU): the largest number that fits and whose transfers fully overlap with compute, found by planning.

    The default is a quarter. The last group may hold fewer. One group of all layers is dense training. `auto` goes with
    `slivertune.attach` and `slivertune train`; other scripts give a number."""
    steps_per_group: int = 20
    """Updates per turn of a group (block-coordinate descent). The paper has 1."""
    order: Order = "random"
    """Order in which groups take turns (S). random is shuffled once, by the seed."""
    seed: int = 0
    """Seed of the `random` order and of stochastic rounding. It must be equal on all ranks."""
    layers: Sequence[str | Sequence[str]] | None = None
    """Layers from bottom to top, for models in which they are not found: for each a module path or a parameter name, or
    several joined by plus signs. `blocks.*` is one layer per block. Together they must name every parameter.

    None (default) finds them in the model. A layer of several parts may be a list, `["norm", "head"]`. A `*` stands for
    one part of a path and repeats its layer."""
    state: StatePlace = "host"
    """Storage of a group's optimizer state and fp32 masters between turns. `discard` deletes them after a turn.

    `host` (default) offloads them to host memory, `disk` to files. `device` keeps them resident, `discard` is BAdam's
    way."""
    state_dir: Annotated[str | Path | None, Spelling(value_name="FOLDER")] = None
    """Folder for the files of `state=disk`, on a fast local disk.

    Ranks may use different folders, and runs may share one. None (default) for any other `state`."""
    state_ram_bytes: Bytes = 0
    """With `state=disk`, bytes of host memory for resident groups, as many as fit.

    All other groups pass through two host buffers in addition, each as large as the largest of them. The default, 0,
    stores every group on disk."""
    master: MasterKind = "fp32"
    """Master weights of bf16 weights: an fp32 copy (the paper's Mixed^Hi), none, or none with stochastic rounding.

    With `fp32` (default) the base optimizer steps the copy, with `none` the bf16 weights themselves, to which small
    updates are lost. With `stochastic` it steps each chunk in fp32, which is then rounded up or down by chance, so that
    small updates add up. fp32 parameters need no copy."""
    device_bytes: BytesOrAuto = "auto"
    """Bytes of the device that may hold offloaded state, and blocks of weights=host, beside those in use. Set it in
    place of the three options below. `auto` takes what the cycles so far left free.

    State has the first share: chunks of at most an eighth of the budget pass two at a time, and up to the largest
    group's state is prefetched. Blocks get the rest. `prefetch_bytes` and `resident_bytes` set their parts, if these
    are given. Optimizers that need whole tensors may take more."""
    stream_bytes: Bytes = 128 * 2**20
    """Size of the chunks in which a group's masters and state pass through the device during a step. 0 takes the whole
    group at once. By default 128MiB.

    Two chunks are on the device during a step. With `gradients="stepped"`, activations are there, too, and both chunks
    together take this many bytes; 0 then takes a whole tensor. `state="device"` does not stream."""
    prefetch_bytes: BytesOrAuto = "auto"
    """Device memory that may hold prefetched chunks, so that their copies overlap with forward and backward. `auto`
    takes the memory that the first cycle left unused.

    0 loads two chunks when the first gradient arrives. `auto` (default) is 0 in the first cycle and without CUDA. On a
    CUDA device it is then the memory that was free at the peak of all cycles so far, less 1/16 of the device. Chunks
    are evicted before a forward without gradients, or with a larger batch than the group has had before. Between the
    updates of one turn (`steps_per_group`), chunks stay resident and are not copied."""
    elementwise: bool | None = None
    """Whether the base optimizer treats every element alone, so that tensors may be cut into chunks. None (default)
    decides by its class. An unknown class gets whole groups of whole tensors."""
    gradients: GradientPlace = "device"
    """Storage of the active group's gradients until their step. host: offload each at once, so that device memory does
    not grow with `layers_per_group`. stepped: none, step each tensor inside the backward, without clipping. All give
    the same bits.

    * `device` (default): in `.grad`, as usual.
    * `host`: each gradient is offloaded to host memory as soon as it is complete. The device holds the gradients in
      flight (the largest, and at most `stream_bytes` of others). `.grad` is then a tensor on the host that computes on
      the device. Add to it, clip it and zero it as usual. No GradScaler.
    * `stepped`: each tensor is stepped as soon as its gradient is complete, which is then freed, so that about one
      exists at a time. Clipping, GradScaler, closures and base optimizers that need the whole group at once are not
      possible. With accumulation, gradients of earlier backward passes are offloaded to the host."""
    waiting: CodesForm | None = None
    """Format in which the device holds the linear weights of idle blocks, int8 or nf4. They are exact by default. Exact
    weights are offloaded to host memory, and saved. Evaluation runs on the weights on the device.

    `int8` takes 8.25 bits per bf16 weight, `nf4` 4.13 bits (by bitsandbytes). The active group, embeddings, norms,
    heads and checkpoints are always exact. Exact weights of idle blocks are offloaded as fp32 masters if these exist.
    Forwards and gradients of inputs use the quantised weights. With `weights="host"` these are offloaded as well."""
    weights: WeightPlace = "device"
    """Storage of blocks that neither run nor train. `host` offloads them to host memory and prefetches each before its
    use, in fewer bits with `waiting`. It works on one device or by DDP.

    `device` (default) keeps all resident. With `host`, each block is prefetched before its forward and, from the active
    group upward, before its backward. Blocks of the active group stay resident through its turn, embedding and head
    always. Needs another `state` than `device`, and no compiled model."""
    resident_bytes: BytesOrAuto = "auto"
    """With `weights=host`, bytes of blocks that stay resident on the device. `auto` takes the memory that the first
    cycle left unused.

    They are beside the slots of the others (two blocks, and those of the largest group). `auto` (default) is 0 in the
    first cycle. On a CUDA device it is then the memory that the first cycle left free, less the largest group's state
    and 1/16 of the device."""
    inactive: InactiveLayers = "frozen"
    """Steps of idle layers. `above` also steps the layers above the active group in each update (BREAD).

    Idle layers are `frozen` by default. The backward passes through the layers above the active group anyway. With
    `above`, it also computes their gradients, and each takes a step without state, as the first of Adafactor. Needs
    `gradients="stepped"`, and fp32 weights or `master="stochastic"`."""
    inactive_rate: float = 1.0
    """With `inactive=above`, learning rate of the layers above the active group, as a share of the active group's.

    Their steps move an element by about the rate, as Adam's do. A base optimizer that scales its rate otherwise (SGD,
    Prodigy, Adafactor with `scale_parameter`) needs a share of its own."""
    compile_step: CompileChoice = "auto"
    """Compilation, by torch.compile, of Adafactor's steps in tiles. `auto` compiles on a CUDA device with Triton.

    Compiled steps take fewer kernels, and give the same result to rounding. With `auto` (default), a failed compilation
    is a warning on one device, and an error on several ranks, which must step alike. `always` also compiles on the CPU,
    and a failure is an error.
    Other optimizers are not compiled."""
    max_grad_norm: float | None = None
    """2-norm to which `step` scales down the active group's gradients, as `clip_grad_norm_` does. None (default) does
    not clip. A script may call `clip_grad_norm_`, too. `HiFT.grad_norm` is the norm before."""

    @classmethod
    def paper(cls, **settings: Any) -> Self:
        """Make the paper's schedule: one layer per group, one update per turn, from the bottom up (Algorithm 1).

        Args:
            settings: Other settings; they may also replace these three.
        """
        return cls(**{"layers_per_group": 1, "steps_per_group": 1, "order": "bottom2up", **settings})

    @classmethod
    def all_layers(cls, **settings: Any) -> Self:
        """Make settings that train all layers in each update, with nothing offloaded.

        Tensors are stepped in the backward, the state stays on the device, and stochastic rounding replaces the
        masters. Use a base optimizer of little state, such as Adafactor, and a model in bf16.

        Args:
            settings: Other settings; they may also replace these.
        """
        return cls(**{**ALL_LAYERS, **settings})

    @property
    def parks(self) -> bool:
        """Whether weights of blocks are quantised or on the host while they do not train."""
        return self.waiting is not None or self.weights == "host"

    @property
    def steps_in_backward(self) -> bool:
        """Whether tensors are stepped inside the backward."""
        return self.gradients == "stepped"

    @property
    def chunk_bytes(self) -> int:
        """Bytes per chunk, 0 for the whole group, as with `state="device"`."""
        if self.state == "device":
            return 0
        stream_bytes = self.stream_bytes
        if self.device_bytes != "auto":
            stream_bytes = min(stream_bytes or self.device_bytes, self.device_bytes // CHUNKS_IN_BUDGET)
        return -(-stream_bytes // 2) if self.steps_in_backward else stream_bytes

    def __post_init__(self) -> None:
        check_layers_per_group(self.layers_per_group)
        check_integer("steps_per_group", self.steps_per_group, 1)
        check_integer("seed", self.seed)
        if self.elementwise is not None:
            check_flag("elementwise", self.elementwise)
        for name, may_be_auto in _SIZES.items():
            # A run file of another program may have a text there.
            object.__setattr__(self, name, read_bytes(name, getattr(self, name), may_be_auto=may_be_auto))
        if self.state == "device" and self.prefetch_bytes not in ("auto", 0):
            raise ValueError(
                f'prefetch_bytes={self.prefetch_bytes} is for offloaded state, and state="device" offloads none. '
                "Leave it out"
            )
        self._check_device_bytes()
        for name, choices in (
            ("order", Order),
            ("state", StatePlace),
            ("master", MasterKind),
            ("gradients", GradientPlace),
            ("weights", WeightPlace),
            ("inactive", InactiveLayers),
            ("compile_step", CompileChoice),
        ):
            check_choice(name, getattr(self, name), get_args(choices))
        if self.state == "disk" and self.state_dir is None:
            raise ValueError('state="disk" needs state_dir, the folder for its files. Name one on a fast local disk')
        if self.state != "disk" and self.state_dir is not None:
            raise ValueError(f'state_dir={str(self.state_dir)!r} needs state="disk", not {self.state!r}. Leave it out')
        if self.state != "disk" and self.state_ram_bytes:
            raise ValueError(
                f'state_ram_bytes={self.state_ram_bytes} keeps some groups of state="disk" in memory, and state='
                f'"{self.state}" has none on a disk. Leave it out, or set state="disk"'
            )
        if self.waiting is not None:
            self._check_waiting(self.waiting)
        self._check_gradients()
        self._check_weights()
        self._check_inactive()

    def _check_device_bytes(self) -> None:
        if self.device_bytes == "auto":
            return
        if self.state == "device" and self.weights == "device":
            raise ValueError(
                f'device_bytes={self.device_bytes} is for offloaded state and weights, and state="device" with '
                'weights="device" offloads none. Leave it out'
            )
        if self.device_bytes < LEAST_DEVICE_BYTES:
            raise ValueError(
                f"device_bytes={self.device_bytes} must be at least {LEAST_DEVICE_BYTES}, since two chunks pass at a "
                "time. To hold nothing ahead, set prefetch_bytes=0 and resident_bytes=0"
            )
        parts = {name: getattr(self, name) for name in ("prefetch_bytes", "resident_bytes")}
        parts = {name: value for name, value in parts.items() if value != "auto"}
        if sum(parts.values()) > self.device_bytes:
            given = " and ".join(f"{name}={value}" for name, value in parts.items())
            raise ValueError(
                f"{given} do not fit into device_bytes={self.device_bytes}, of which they are parts. Lower them, or "
                "raise device_bytes"
            )

    def _check_inactive(self) -> None:
        check_number("inactive_rate", self.inactive_rate)
        if not self.inactive_rate > 0:
            raise ValueError(
                f'inactive_rate={self.inactive_rate!r} must be a number over 0. Use inactive="frozen" for no steps'
            )
        if self.inactive == "frozen":
            if self.inactive_rate != 1.0:
                raise ValueError(
                    f'inactive_rate={self.inactive_rate!r} is for layers that step, and inactive="frozen" steps none. '
                    'Leave it out, or set inactive="above"'
                )
            return
        for name, needed in (("gradients", "stepped"), ("waiting", None), ("weights", "device")):
            value = getattr(self, name)
            if value != needed:
                way_out = f"Leave {name} out" if needed is None else f'Set {name}="{needed}"'
                raise ValueError(
                    f'inactive="above" steps idle weights inside the backward, exact and on the device, and {name}='
                    f'"{value}" does not allow that. {way_out}, or use inactive="frozen"'
                )

    def _check_weights(self) -> None:
        if self.weights == "device":
            if self.resident_bytes not in ("auto", 0):
                raise ValueError(
                    f"resident_bytes={self.resident_bytes} is for offloaded weights. Set "
                    'weights="host", or leave it out'
                )
            return
        if self.state == "device":
            raise ValueError(
                'state="device" takes several times the device memory that weights="host" saves. Use '
                'state="host" or "disk"'
            )

    def _check_waiting(self, waiting: CodesForm) -> None:
        check_choice("waiting", waiting, get_args(CodesForm))
        if self.state not in ("host", "disk"):
            raise ValueError(
                f'waiting="{self.waiting}" offloads exact weights with their state, and state="{self.state}" offloads '
                'none. Use state="host" or "disk"'
            )

    def _check_gradients(self) -> None:
        if self.gradients == "host" and self.state == "device":
            raise ValueError(
                'gradients="host" loads gradients with their chunk of the state, and state="device" does not move it. '
                'Use gradients="stepped", or state="host"'
            )
        if self.max_grad_norm is None:
            return
        check_number("max_grad_norm", self.max_grad_norm)
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm!r} must be a number over 0. Use None for no clipping")
        if self.gradients == "stepped":
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm:g} needs the norm of all gradients before the first is stepped, "
                'and gradients="stepped" keeps none. Use gradients="host", which needs about as little device memory'
            )
