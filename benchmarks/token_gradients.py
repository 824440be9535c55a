"""How near TokenTune's gradients are to dense ones, on the embedded base model.

The byte-level Llama of `slivertune train` (6 blocks; trained first where it is not cached, in one to two minutes)
reads windows of the Python language reference. For each pattern and ratio: the cosine between the gradient of one draw
and the dense gradient of the same batch, and the ratio of their norms, over all parameters; means over batches and
draws.

    OMP_NUM_THREADS=1 python benchmarks/token_gradients.py       # three minutes on one core
"""

import argparse
import dataclasses
from pathlib import Path
from pydoc_data.topics import topics

import torch
from environment import record_environment
from result_files import RESULTS, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from slivertune.tokentune import gradient_quality
from slivertune.training.embedded.base_model import BASE_RECIPE, ensure_base_model


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--draws", type=int, default=4, help="of each batch, pattern and ratio")
    parser.add_argument("--chunk_size", type=int, default=16, help="positions of a chunk; another needs --output")
    parser.add_argument("--plot", type=Path, help="where to draw it, such as quality.png")
    parser.add_argument("--output", type=Path, default=RESULTS / "token_gradients.json", help="where to write")
    arguments = parser.parse_args()
    if arguments.chunk_size != 16 and arguments.output == RESULTS / "token_gradients.json":
        parser.error("--chunk_size of another than 16 is a trial and needs --output: the results are of 16")
    torch.set_num_threads(1)
    folder = ensure_base_model(BASE_RECIPE)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor(tokenizer("\n".join(topics.values()))["input_ids"])
    shape = (arguments.batches, arguments.batch_size, arguments.length)
    windows = tokens[: tokens.numel() // arguments.length * arguments.length].view(-1, arguments.length)
    # Spread over the whole text.
    rows = windows[torch.linspace(0, len(windows) - 1, shape[0] * shape[1]).long()].view(shape)
    batches = [{"input_ids": batch, "labels": batch} for batch in rows]
    quality = gradient_quality(model, batches, num_draws=arguments.draws, chunk_size=arguments.chunk_size)
    print(quality.table())
    settings = {name: getattr(arguments, name) for name in ("batches", "batch_size", "length", "draws", "chunk_size")}
    write_json(
        arguments.output,
        {
            "environment": record_environment(),
            "settings": settings,
            "num_draws": quality.num_draws,
            "rows": [dataclasses.asdict(row) for row in quality.rows],
        },
    )
    print(f"written to {arguments.output}")
    if arguments.plot is not None:
        print(f"drawn to {quality.plot(arguments.plot)}")


if __name__ == "__main__":
    main()
