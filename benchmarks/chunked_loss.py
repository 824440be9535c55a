"""The loss of a large head: ours in chunks against torch's own, in peak and time.

`torch.nn.functional.linear_cross_entropy` (since torch 2.13) is the reference of plain logits with `options=None`, and
works in chunks with `LinearCrossEntropyOptions()`. This measures whether it can take the place of
`slivertune.chunked_loss`: forward and backward of one head, with its weight frozen or trained, in fp32 and bf16.

    OMP_NUM_THREADS=1 python benchmarks/chunked_loss.py                 # five minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/chunked_loss.py --quick --output trial.json

Every measurement has a process of its own. Its peak is the most memory that it held (`ru_maxrss`) less what it held
before the first pass; the time is CPU time, the median of several passes after one that is not counted.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import record_environment
from result_files import RESULTS, write_json

from slivertune.chunked_loss.function import chunked_cross_entropy

FULL = {"rows": 2048, "size": 1024, "classes": 32_000, "passes": 5}
QUICK = {"rows": 256, "size": 64, "classes": 997, "passes": 1}
KINDS = ("ours", "torch in chunks", "torch, all logits")
CASES = [(dtype, trained) for dtype in ("float32", "bfloat16") for trained in (False, True)]

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def losses() -> dict[str, Loss]:
    """What is compared, by name."""
    options = torch.nn.LinearCrossEntropyOptions()
    return {
        "ours": chunked_cross_entropy,
        "torch in chunks": lambda hidden, weight, targets: F.linear_cross_entropy(
            hidden, weight, targets, options=options
        ),
        "torch, all logits": F.linear_cross_entropy,
    }


def measure(kind: str, dtype: str, trained: bool, rows: int, size: int, classes: int, passes: int) -> dict[str, float]:
    """One case of one kind, in this process.

    Returns:
        Bytes beyond the inputs, seconds of a pass, and how far the loss and the gradients are from fp64's.
    """
    torch.manual_seed(0)
    loss_of = losses()[kind]
    hidden = torch.randn(rows, size).to(getattr(torch, dtype)).requires_grad_()
    weight = (0.05 * torch.randn(classes, size)).to(getattr(torch, dtype)).requires_grad_(trained)
    targets = torch.randint(classes, (rows,))
    before = _resident_bytes()
    seconds = []
    for _ in range(passes + 1):
        hidden.grad = weight.grad = None
        start = time.process_time()
        loss = loss_of(hidden, weight, targets)
        loss.backward()
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {
        "peak_bytes": peak,
        "seconds": statistics.median(seconds[1:]),
        **_errors(float(loss.detach()), hidden, weight, targets, trained),
    }


def _errors(
    loss: float, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, trained: bool
) -> dict[str, float]:
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_(trained)
    exact = F.cross_entropy(exact_hidden @ exact_weight.T, targets)
    exact.backward()
    errors = {"loss_error": abs(loss - float(exact)), "hidden_error": _error(hidden, exact_hidden)}
    return {**errors, "weight_error": _error(weight, exact_weight)} if trained else errors


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference of two gradients, relative to the largest value."""
    assert found.grad is not None and exact.grad is not None
    return float((found.grad.double() - exact.grad).abs().max() / exact.grad.abs().max())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see whether it runs")
    parser.add_argument("--output", type=Path, default=RESULTS / "chunked_loss.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(**json.loads(arguments.one))))
        return
    sizes = QUICK if arguments.quick else FULL
    rows: list[dict[str, Any]] = []
    for dtype, trained in CASES:
        for kind in KINDS:
            case = {"kind": kind, "dtype": dtype, "trained": trained}
            command = [sys.executable, __file__, "--one", json.dumps({**case, **sizes})]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append({**case, **json.loads(found.stdout.splitlines()[-1])})
            last = rows[-1]
            head = "trained" if trained else "frozen"
            print(
                f"{dtype:9} head {head:8} {kind:18} {last['peak_bytes'] / 1e6:8.1f} MB {last['seconds']:7.3f} s  "
                f"hidden {last['hidden_error']:.1e}  weight {last.get('weight_error', 0.0):.1e}",
                flush=True,
            )
    write_json(arguments.output, {"environment": record_environment(), "sizes": sizes, "rows": rows})


if __name__ == "__main__":
    main()
