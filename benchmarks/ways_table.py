"""The table and the picture of docs/which-method.md, from the answer of `slivertune plan --compare --json`.

The answer and the picture (minutes), the table, and the table put into the page:

slivertune plan --model llama-3.1-8b --seq_length 2048 --gpu 4090 --compare --json \
    --plot docs/images/ways_8b_4090.png > benchmarks/results/ways_8b_4090.json
python benchmarks/ways_table.py
python benchmarks/ways_table.py --write
"""

import argparse
import json
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
RESULT = CHECKOUT / "benchmarks" / "results" / "ways_8b_4090.json"
PAGE = CHECKOUT / "docs" / "which-method.md"
BEGIN, END = "<!-- ways -->\n", "<!-- /ways -->\n"
GIB = 2**30


def table(answer: dict[str, Any]) -> str:
    """Markdown: a row a way, the fastest first; those that do not fit last."""
    lines = [
        "| Way | Trains | GPU | Host | Batch | Tokens a second | On which a weight trains |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in answer["rows"]:
        if "reason" in row:
            lines.append(f"| {row['title']} | can't be planned: {row['reason']} |  |  |  |  |  |")
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
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in docs/which-method.md")
    arguments = parser.parse_args()
    text = table(json.loads(RESULT.read_text(encoding="utf-8")))
    if not arguments.write:
        print(text, end="")
        return
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
