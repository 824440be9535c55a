"""What FSDP2 with `CPUOffloadPolicy` on one rank copies, when and on which stream: a trace by torch's source.

Of torch 2.13.0, `torch/distributed/fsdp/_fully_shard/`:

- A unit's forward begins with `unshard` and `wait_for_unshard` (`_fsdp_param_group.py` 551-552, from the module's
  forward pre-hook, `_fsdp_state.py` 120). On one rank `unshard` copies nothing: it records an event and returns
  (`_fsdp_param_group.py` 392-404), so that neither the forward's implicit prefetch nor `_backward_prefetch` (795-830)
  nor `set_modules_to_forward_prefetch` brings anything early. The copy is made by `wait_for_unshard`, parameter by
  parameter (437-459): `all_gather_inputs` moves the shard with `.to(device, non_blocking=True)` (`_fsdp_param.py`
  896-901) and `tensor.copy_` copies that once more on the device (459), both *on the stream that computes*; no other
  stream is entered. So every byte of it is waited for.
- After its forward a unit is freed (`reshard`, 499-509, from 563), but for those that `fully_shard` was told to keep;
  there is no resident part.
- A backward comes to a unit by a hook on each of its outputs that requires a gradient (`_fsdp_state.py` 434-452):
  blocks below the active group have none and are not copied again. The hook runs `unshard` and `wait_for_unshard`
  (`_fsdp_param_group.py` 576-583), before a checkpointed unit is computed again, whose own forward then finds it there
  (`_fsdp_state.py` 295-303).
- When a unit's gradients are there, `post_backward` (588) frees it and, where it has gradients, calls `foreach_reduce`
  (688): copied into one buffer on the computing stream (`_fsdp_collectives.py` 603), from there into another on the
  reduce-scatter stream after that (607, 611-631), and to pinned host memory by `.to("cpu", non_blocking=True)` on the
  same (737-739). Nothing else waits for it until the end of the backward, where the host does
  (`grad_offload_event.synchronize()`, `_fsdp_param_group.py` 769-772) and the computing stream with it (764-765).
- The optimizer then steps the shards where they lie, on the host's processor.

With more than one rank the copy to the device is made on `all_gather_copy_in_stream` (`_fsdp_collectives.py` 336-361),
beside the computation.
"""

from collections.abc import Mapping, Sequence

from weight_moments import Moment

from slivertune.planning.schedule import Begin, Entry, Record, Synchronize, Transfer, Wait, Work

TORCH = "2.13.0"
"""The version whose lines these are."""


class FSDP2Copies:
    """The entries that FSDP2's copies are, at each moment of a step.

    Args:
        unit_bytes: Bytes of each unit's weights.
        stays: Of each unit, whether it stays on the device between forward and backward.
        first_event: Numbers of events from here on are free.
    """

    def __init__(self, unit_bytes: Sequence[int], stays: Sequence[bool], first_event: int) -> None:
        self._bytes, self._stays = unit_bytes, stays
        self._event = first_event
        self._present: set[int] = set()
        self.copied: list[tuple[str, int]] = []
        """What was copied to the device: in which pass, and which unit."""

    def at(self, moment: Moment) -> list[Entry]:
        """What is queued at a moment."""
        unit = moment.unit
        if moment.kind == "forward begins" or moment.kind == "backward begins":
            return self._bring(unit, moment.kind.split()[0])
        if moment.kind == "forward ends":
            if not self._stays[unit]:
                self._present.discard(unit)
            return []
        if moment.kind == "backward ends":
            self._present.discard(unit)
            return self._take(moment.gradient_bytes) if moment.gradient_bytes else []
        return [Synchronize("outbound")]

    def _bring(self, unit: int, phase: str) -> list[Entry]:
        if unit in self._present:
            return []
        self._present.add(unit)
        self.copied.append((phase, unit))
        num_bytes = self._bytes[unit]
        return [Transfer("computing", "inbound", num_bytes), Work("computing", {(0, 2 * num_bytes): 1})]

    def _take(self, num_bytes: int) -> list[Entry]:
        copy, self._event = {(0, 2 * num_bytes): 1}, self._event + 1
        return [
            Work("computing", copy),
            Record("computing", self._event),
            Wait("outbound", self._event),
            Work("outbound", copy),
            Transfer("outbound", "outbound", num_bytes),
        ]


def with_fsdp2(
    entries: Sequence[Entry], moments: Mapping[int, Moment], unit_bytes: Sequence[int], stays: Sequence[bool]
) -> list[Entry]:
    """A recorded schedule as FSDP2 would run it: its copies in place of HiFT's own, and the update left to the host.

    Args:
        entries: Of HiFT on one device, with marks.
        moments: By number of a mark.
        unit_bytes: Bytes of each unit's weights.
        stays: Of each unit, whether it stays on the device between forward and backward.
    """
    copies = FSDP2Copies(unit_bytes, stays, max((e.event for e in entries if isinstance(e, Record)), default=0))
    result: list[Entry] = []
    is_step = False
    for entry in entries:
        if isinstance(entry, Begin):
            is_step = entry.phase == "step"
            result.append(entry)
        elif isinstance(entry, Record) and entry.event in moments:
            result += copies.at(moments[entry.event])
        elif isinstance(entry, Work) and entry.stream == "computing" and not is_step:
            result.append(entry)
    return result
