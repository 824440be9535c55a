"""The table of docs/which-method.md, from the answer of `slivertune plan --compare --json`.

The answer and the picture (minutes), and the table put into the page:

slivertune plan --model llama-3.1-8b --seq_length 2048 --gpu 4090 --compare --json \
    --plot docs/images/ways_8b_4090.png > benchmarks/results/ways_8b_4090.json
python benchmarks/tables.py --write
"""

from typing import Any

from markdown_table import markdown_table

GIB = 2**30


def table(answer: dict[str, Any]) -> str:
    """Markdown: a row a way, the fastest first; those that do not fit last."""
    heads = ["Way", "Trains", "GPU", "Host", "Batch", "Tokens a second", "On which a weight trains"]
    lines = []
    for row in answer["rows"]:
        if "reason" in row:
            lines.append([row["title"], f"can't be planned: {row['reason']}", *[""] * 5])
            continue
        trained = "all weights" if row["trains_all"] else f"{row['num_trainable_peak'] / 1e6:,.0f}M values"
        cells = [row["title"], trained, f"{row['need_bytes'] / GIB:.1f} GiB", f"{row['host_bytes'] / GIB:.0f} GiB"]
        if row["fits"]:
            cells += [
                str(row["request"]["batch_size"]),
                f"{row['time']['tokens_per_second']:,.0f}",
                f"{row['weight_tokens_per_second']:,.0f}",
            ]
        else:
            cells += ["does not fit with 1", "", ""]
        lines.append(cells)
    return markdown_table(heads, lines)
