"""A trial: rates by layer, each layer's a factor of that of the layer above it.

A script sets such rates by parameter groups. `slivertune train` has no option for them, so this program makes the
groups where the Trainer makes the optimizer. The search starts it for each run, in place of `slivertune train`.

    OMP_NUM_THREADS=1 python benchmarks/layer_rates.py full full-layers trial.json --rate 4e-3 --seeds 0 1 2
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

from slivertune import HiFT, find_layers
from slivertune.cli import main as run_command
from slivertune.training import assemble

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
    if sum(len(group["params"]) for group in groups) != sum(len(group["params"]) for group in optimizer.param_groups):
        raise ValueError("not each parameter of the optimizer is in one layer; use an untied model")
    optimizer.param_groups[:] = groups


class ByLayer(Trainer):
    """A Trainer whose own optimizer has rates by layer, also where HiFT takes it over."""

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        """Make the optimizer, and split its groups."""
        optimizer = super().create_optimizer(*arguments, **options)
        if not isinstance(optimizer, HiFT):
            split_by_layer(optimizer, self.model, float(os.environ[FACTOR]))
        return optimizer


def train(words: list[str]) -> None:
    """Run `slivertune train` with rates by layer."""
    assemble.Trainer = ByLayer
    sys.argv = ["slivertune", "train", *words]
    sys.exit(run_command())


def search(arguments: argparse.Namespace) -> None:
    """Search the rate of the topmost layer as `evidence.py` does, train the other seeds at it, and write the row."""
    import evidence
    from result_files import write_json

    os.environ[FACTOR] = arguments.factor
    run_compare = evidence.run_compare
    evidence.run_compare = lambda words: run_compare(words, program=(str(Path(__file__).resolve()), "train"))
    asked, name = evidence.read_rows_file(), arguments.name
    asked["rows"][name] = asked["rows"][arguments.base]
    asked["tasks"]["language"]["rates"][name] = arguments.rate
    common, folder = evidence.common_options(asked, "language", None), Path("runs/layer_rates", name)
    write_json(arguments.results, evidence.run_row(asked, "language", name, folder, arguments.seeds, common))


def main() -> None:
    """Search, or be one of the runs of a search."""
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="row of evidence.yaml whose options it has")
    parser.add_argument("name", help="of the row; its end, such as -x2.4, says how many times as many updates it has")
    parser.add_argument("results", type=Path, help="file to write the row to")
    parser.add_argument("--factor", default="0.8", help="rate of a layer over that of the layer above (%(default)s)")
    parser.add_argument("--rate", type=float, required=True, help="where the search begins, of the topmost layer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="the first searches the rate (%(default)s)")
    search(parser.parse_args())


if __name__ == "__main__":
    main()
