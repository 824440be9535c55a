"""A trial: `full` with rates by layer, each layer's a factor of that of the layer above it.

A script sets such rates by parameter groups. `slivertune train` has no option for them, so this program makes the
groups where the Trainer makes the optimizer. The search starts it for each run, in place of `slivertune train`.

    OMP_NUM_THREADS=1 python benchmarks/layer_rates.py 0.8 full-layers-0.8 trial.json
"""

import os
import sys
from pathlib import Path
from typing import Any

from torch import nn

from slivertune import find_layers
from slivertune.interop.trainer import Attachment

FACTOR = "LAYER_RATES_FACTOR"
"""Environment variable by which the search tells each run the factor."""


def split_by_layer(optimizer: Any, model: nn.Module, factor: float) -> None:
    """Split the groups of an optimizer by the layers of its model, and give each layer its rate.

    Args:
        optimizer: Of all parameters of the model, with one rate.
        model: The model.
        factor: A layer's rate over that of the layer above. The head keeps the rate of the optimizer.
    """
    parameters = dict(model.named_parameters())
    groups = []
    for depth, layer in enumerate(reversed(find_layers(model))):
        own = {id(parameters[name]) for name in layer.parameter_names}
        for group in optimizer.param_groups:
            members = [each for each in group["params"] if id(each) in own]
            if members:
                groups.append({**group, "lr": group["lr"] * factor**depth, "params": members})
    if sum(len(group["params"]) for group in groups) != len(parameters):
        raise ValueError("not each parameter is in one layer and in the optimizer; use an untied model")
    optimizer.param_groups[:] = groups


def train(words: list[str]) -> None:
    """Run `slivertune train` with rates by layer."""
    from slivertune.cli import main as run_command

    make_base = Attachment._make_base

    def make_by_layer(attachment: Attachment) -> Any:
        optimizer = make_base(attachment)
        split_by_layer(optimizer, attachment.trainer.model, float(os.environ[FACTOR]))
        return optimizer

    Attachment._make_base = make_by_layer  # type: ignore[method-assign]
    sys.argv = ["slivertune", "train", *words]
    sys.exit(run_command())


def search(factor: str, name: str, results: Path) -> None:
    """Search the head's rate as `evidence.py` does, with its first seed, and write the row to `results`."""
    import evidence
    from result_files import write_json

    os.environ[FACTOR] = factor
    run_compare = evidence.run_compare
    evidence.run_compare = lambda words: run_compare(words, program=(str(Path(__file__).resolve()), "train"))
    asked = evidence.read_rows_file()
    asked["rows"][name] = asked["rows"]["full"]
    common = evidence.common_options(asked, "language", None)
    write_json(results, evidence.run_row(asked, "language", name, Path("runs/layer_rates", name), [0], common))


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2:])
    else:
        search(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
