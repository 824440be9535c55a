"""What a user can choose about HiFT."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from slivertune.core.removed_settings import refuse_removed
from slivertune.core.setting_checks import check_bytes_or_auto, check_choice, check_integer, check_number
from slivertune.hift.block_codes import WaitingForm

Order = Literal["bottom2up", "top2down", "random"]
StatePlace = Literal["host", "device", "disk", "discard"]
MasterKind = Literal["fp32", "none"]
GradientPlace = Literal["device", "host", "stepped"]
WeightPlace = Literal["device", "host"]


@refuse_removed
@dataclass(frozen=True, kw_only=True, slots=True)
class HiFTConfig:
    """Settings of HiFT; the paper's symbols in parentheses.

    Raises:
        ValueError: If a value is outside what its field says.
    """

    layers_per_group: int = 1
    """Layers in a group (m). The last group may hold fewer. All layers in one group is ordinary fine-tuning."""
    steps_per_group: int = 1
    """Updates a group gets before the next group's turn; 1 is the paper, more is block-coordinate descent."""
    order: Order = "bottom2up"
    """Order in which groups take their turn (S). `random` is shuffled once, by `seed`, and then kept."""
    seed: int = 0
    """Seed of the `random` order; must be the same on all ranks."""
    layers: Sequence[Sequence[str]] | None = None
    """Layers from bottom to top, each a list of module paths or parameter names; None finds them in the model. A `*`
    stands for one part of a path, and repeats its layer: `["blocks.*"]` is a layer per block."""
    state: StatePlace = "host"
    """Where a group's optimizer state and masters wait for their turn. `discard` throws them away when the group's
    turn ends, so nothing waits (BAdam's way)."""
    state_dir: str | Path | None = None
    """Folder of the files of `state="disk"`, on a fast local disk; may differ between ranks, and several runs may share
    it."""
    state_ram_bytes: int = 0
    """With `state="disk"`: bytes of host memory for groups that never leave it, as many as fit. The other groups need
    two buffers of their largest beside them."""
    master: MasterKind = "fp32"
    """What 16-bit weights are trained on: an fp32 copy (the paper's Mixed^Hi), or the 16-bit weights themselves
    (`none`). fp32 weights need none."""
    stream_bytes: int = 128 * 2**20
    """Bytes on the device of one piece of a group (master, state and temporaries together) while it is stepped; two
    pieces exist at a time. With stepped gradients, where activations live beside them, it is the bytes of both pieces
    together. 0 takes the whole group at once (with stepped gradients a whole tensor). `state="device"` does not
    stream."""
    prefetch_bytes: int | Literal["auto"] = "auto"
    """Bytes of the device that pieces may hold ahead of their step, so that they are copied beside the forward and the
    backward. 0 loads two pieces when the first gradient arrives. `auto` takes on a CUDA device what was free at the
    highest moment of the cycles so far, less a sixteenth of the device, and 0 before the first has ended; elsewhere it
    is 0. Batches that are larger than a group has seen before, and forwards without gradients, find nothing held.
    Between two updates of one turn (`steps_per_group`) what is held stays, and is not copied."""
    elementwise: bool | None = None
    """Whether the base optimizer treats every element alone, so that tensors may be cut into pieces. None decides by
    the class; unknown classes get whole groups of whole tensors."""
    gradients: GradientPlace = "device"
    """Where the active group's gradients wait for their step; all three give the same bits.

    * `device`: in `.grad`, as ever.
    * `host`: each leaves for host memory as soon as it is complete, so that the device holds those that are leaving
      (the largest, and at most `stream_bytes` of others) whatever `layers_per_group` is. `.grad` then holds a tensor
      that lies on the host and computes on the device; it is added to, clipped and zeroed as any other. No GradScaler.
    * `stepped`: nowhere; each tensor is stepped inside the backward, as soon as its gradient is complete, and the
      gradient is dropped, so that about one is alive at a time. Nothing may come between gradients and step: no
      clipping, no GradScaler, no closure, and no base optimizer that needs the whole group at once. With accumulation,
      what earlier backward passes bring waits on the host."""
    waiting: WaitingForm | None = None
    """Hold the linear weights of the blocks that are not training on the device in fewer bits: `int8` (8.25 bits a bf16
    weight) or `nf4` (4.13 bits, with bitsandbytes). The active group, embeddings, norms and heads are exact, what
    is saved is exact, and exact weights wait on the host, as fp32 masters where there are such. Forwards and the
    gradients of inputs, evaluation too, run on what lies on the device. With `weights="host"` the codes wait on the
    host, too. None holds all weights exact."""
    weights: WeightPlace = "device"
    """Where blocks wait that neither run nor train. `host`: in (pinned) host memory, with their exact bits or as the
    codes of `waiting`; each comes to the device just ahead of its forward, and again, from the active group upward,
    ahead of its backward. The active group's stay there through its turn. Embedding and head always stay. One device,
    or DDP; the state waits on the host or on disk, and nothing is compiled."""
    resident_bytes: int | Literal["auto"] = "auto"
    """With `weights="host"`, bytes of blocks that stay on the device all the same, beside the slots through which the
    others come (two blocks, and what the largest group trains). `auto` is 0 in the first cycle, and then, on a CUDA
    device, what that has left free, less a group's state and a sixteenth of the device."""
    max_grad_norm: float | None = None
    """Scale the active group's gradients down to this 2-norm in `step`, as `clip_grad_norm_` does, which a script may
    call as well; None does not. The norm before is `HiFT.grad_norm`."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether tensors are stepped inside the backward."""
        return self.gradients == "stepped"

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece; 0 for the whole group, which is what stays on the device."""
        if self.state == "device":
            return 0
        return -(-self.stream_bytes // 2) if self.steps_in_backward else self.stream_bytes

    def __post_init__(self) -> None:
        layers_per_group: object = self.layers_per_group
        if layers_per_group == "auto":
            raise ValueError(
                "layers_per_group='auto' must be an integer: only the command line chooses it. Take the number that "
                "`slivertune plan --layers_per_group auto` prints"
            )
        for name, least in (("layers_per_group", 1), ("steps_per_group", 1), ("stream_bytes", 0), ("seed", None)):
            check_integer(name, getattr(self, name), least)
        check_bytes_or_auto("prefetch_bytes", self.prefetch_bytes)
        if self.state == "device" and self.prefetch_bytes not in ("auto", 0):
            raise ValueError(
                f'prefetch_bytes={self.prefetch_bytes} is for state that waits off the device; with state="device" '
                "leave it out"
            )
        for name, choices in (
            ("order", Order),
            ("state", StatePlace),
            ("master", MasterKind),
            ("gradients", GradientPlace),
            ("weights", WeightPlace),
        ):
            check_choice(name, getattr(self, name), get_args(choices))
        if self.state == "disk" and self.state_dir is None:
            raise ValueError('state="disk" needs state_dir, the folder for its files; name one on a fast local disk')
        if self.state != "disk" and self.state_dir is not None:
            raise ValueError(f'state_dir={str(self.state_dir)!r} is used by state="disk" alone, not {self.state!r}')
        check_integer("state_ram_bytes", self.state_ram_bytes, 0)
        if self.state != "disk" and self.state_ram_bytes:
            raise ValueError(
                f'state_ram_bytes={self.state_ram_bytes} keeps some groups of state="disk" in memory, and state='
                f'"{self.state}" has none on a disk; leave it out, or set state="disk"'
            )
        if self.waiting is not None:
            self._check_waiting(self.waiting)
        self._check_gradients()
        self._check_weights()

    def _check_weights(self) -> None:
        check_bytes_or_auto("resident_bytes", self.resident_bytes)
        if self.weights == "device":
            if self.resident_bytes not in ("auto", 0):
                raise ValueError(
                    f"resident_bytes={self.resident_bytes} is for weights that wait off the device; set "
                    'weights="host", or leave it out'
                )
            return
        if self.state == "device":
            raise ValueError(
                'state="device" keeps several times the bytes on the device that weights="host" takes off it; use '
                'state="host" or "disk"'
            )

    def _check_waiting(self, waiting: WaitingForm) -> None:
        check_choice("waiting", waiting, get_args(WaitingForm))
        if self.state not in ("host", "disk"):
            raise ValueError(
                f'waiting="{self.waiting}" lets exact weights wait with their state off the device, which '
                f'state="{self.state}" does not keep there; use state="host" or "disk"'
            )

    def _check_gradients(self) -> None:
        if self.gradients == "host" and self.state == "device":
            raise ValueError(
                'gradients="host" brings gradients back with their piece of the state, which state="device" does not '
                'move; use gradients="stepped", or state="host"'
            )
        if self.max_grad_norm is None:
            return
        check_number("max_grad_norm", self.max_grad_norm)
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm!r} must be a number over 0, or None for no clipping")
        if self.gradients == "stepped":
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm:g} needs the norm of all gradients before the first is stepped, "
                'and gradients="stepped" keeps none; use gradients="host", which takes about as little of the device'
            )
