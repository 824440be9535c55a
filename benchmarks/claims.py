"""What the papers and we claim, the rows of `quality.py` that show it, and the rule by which a claim held.

Of figures that each row has at its own best rate, one a seed: two rows differ if their ranges do not overlap. `as good`
holds unless they differ and the first is worse; `better` holds if they differ and the first is better, does not if they
differ and it is worse, and is not decided where ranges overlap.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

from measured_row import MeasuredRow

Relation = Literal["as good", "better", "alike"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What somebody says of a method, and the rows that show it."""

    text: str
    source: str
    relation: Relation
    rows: tuple[str, ...]
    """`alike` takes any number of rows, the others two."""

    def verdict(self, of_task: dict[str, MeasuredRow]) -> str:
        """`held`, `not held` or `not decided` and the figures; nothing where a row or its seeds are missing."""
        known = [of_task[name] for name in self.rows if name in of_task]
        if len(known) < len(self.rows) or min(len(each.values) for each in known) < 2:
            return ""
        first, second = known[:2]
        differing = [(one, other) for one, other in itertools.combinations(known, 2) if one.differs(other)]
        if self.relation == "alike":
            word = "not held" if differing else "held"
        elif self.relation == "as good":
            word = "not held" if differing and not first.is_better(second) else "held"
        elif differing:
            word = "held" if first.is_better(second) else "not held"
        else:
            word = "not decided"
        return f"**{word}**: {'; '.join(map(str, known))}"


HIFT, SFT, TOKENS, OURS = "HiFT", "SFT", "TokenTune", "this library"
CLAIMS = (
    Claim(
        text="fine-tuning a group at a time is as good as all layers at once, after as many updates",
        source=f"{HIFT}, 4.2",
        relation="as good",
        rows=("hift-1", "dense"),
    ),
    Claim(
        text="the order of groups has almost no effect (bottom up, top down, random)",
        source=f"{HIFT}, 4.5",
        relation="alike",
        rows=("hift-1", "hift-1-top-down", "hift-1-random"),
    ),
    Claim(
        text="the size of groups has a negligible effect (m = 1, 2, 4)",
        source=f"{HIFT}, 4.6",
        relation="alike",
        rows=("hift-1", "hift-2", "hift-4"),
    ),
    Claim(
        text="a rate held for a cycle is better than one that changes within it",
        source=f"{HIFT}, 4.6",
        relation="better",
        rows=("hift-1", "hift-1-not-held"),
    ),
    Claim(
        text="accumulated gradients choose better weights than momentum",
        source=f"{SFT}, 5.1",
        relation="better",
        rows=("sft-ag", "sft-ma"),
    ),
    Claim(
        text="SFT (AG) is at least as good as LoRA of as many weights",
        source=f"{SFT}, 5.1",
        relation="as good",
        rows=("sft-ag", "lora-64"),
    ),
    Claim(
        text="so is it over 4-bit weights, beside QLoRA",
        source=f"{SFT}, 5.1",
        relation="as good",
        rows=("qsft", "qlora-64"),
    ),
    Claim(
        text="weights that are chosen again are better than a fixed random choice",
        source=f"{SFT}, 3",
        relation="better",
        rows=("sft-ag", "sft-fixed"),
    ),
    Claim(
        text="30 % of the tokens, each drawn by itself, are as good as all",
        source=f"{TOKENS}, abstract",
        relation="as good",
        rows=("tokens-random", "dense"),
    ),
    Claim(
        text="30 % of the tokens are as good as all under LoRA",
        source=f"{TOKENS}, abstract",
        relation="as good",
        rows=("lora-64-tokens", "lora-64"),
    ),
    Claim(
        text="chunks of neighbours are better than single tokens",
        source=OURS,
        relation="better",
        rows=("tokens-chunks", "tokens-random"),
    ),
    Claim(
        text="waiting layers in NF4 are as good as exact ones",
        source=OURS,
        relation="as good",
        rows=("hift-1-nf4", "hift-1"),
    ),
    Claim(
        text="state in 8 bits is as good as in 32",
        source="bitsandbytes",
        relation="as good",
        rows=("dense-8bit", "dense"),
    ),
    Claim(
        text="HiFT (m = 1) is as good as BAdam's way, a block for 20 updates",
        source=OURS,
        relation="as good",
        rows=("hift-1", "hift-1-stays"),
    ),
    Claim(
        text="HiFT (m = 2) is as good as LISA, which always trains embedding and head",
        source=OURS,
        relation="as good",
        rows=("hift-2", "lisa"),
    ),
    Claim(
        text="HiFT (m = 4) is as good as GaLore",
        source=OURS,
        relation="as good",
        rows=("hift-4", "galore-64"),
    ),
)


def _idea(text: str, *pairs: tuple[str, str]) -> tuple[Claim, ...]:
    """That the first row of each pair is better than the second, which it changes."""
    return tuple(Claim(text=text, source=OURS, relation="better", rows=pair) for pair in pairs)


IDEAS = (
    *_idea(
        "HiFT with less momentum (beta1 = 0.5), since what it remembers is a cycle old",
        ("hift-1-momentum-0.5", "hift-1"),
        ("hift-2-momentum-0.5", "hift-2"),
        ("hift-4-momentum-0.5", "hift-4"),
        ("hift-2-momentum-0.5-x2", "hift-2-x2"),
    ),
    *_idea("the same of dense fine-tuning, where it is not old", ("dense-momentum-0.5", "dense")),
    *_idea(
        "HiFT stays with a group for 20 updates, so that what its momentum remembers is fresh",
        ("hift-1-stays", "hift-1"),
        ("hift-2-stays", "hift-2"),
        ("hift-4-stays", "hift-4"),
        ("hift-2-stays-x2", "hift-2-x2"),
        ("hift-2-stays-x4", "hift-2-x4"),
    ),
    *_idea("the same at the schedule's rate, which is not held for a cycle", ("hift-2-stays-not-held", "hift-2-stays")),
    *_idea("SFT chooses once, by the gradients of the first updates, and keeps the choice", ("sft-ag-once", "sft-ag")),
    *_idea("SFT chooses again every 60 updates, not every 20", ("sft-ag-60", "sft-ag")),
)
"""What was tried to improve a method."""
