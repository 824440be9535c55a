import dataclasses
from typing import Any

import pytest

import slivertune as st


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "Give exactly one of them"),
        ({"ratio": 0.3, "num_tokens": 4}, r"ratio=0.3 and num_tokens=4\. Give exactly one"),
        ({"ratio": 0.0}, r"ratio=0.0 must be in \(0, 1\]"),
        ({"ratio": -0.1}, r"ratio=-0.1 must be in \(0, 1\]"),
        ({"ratio": 1.01}, r"ratio=1.01 must be in \(0, 1\]"),
        ({"ratio": float("nan")}, r"ratio=nan must be in \(0, 1\]"),
        ({"num_tokens": 0}, "num_tokens=0 must be at least 1"),
        ({"ratio": "auto"}, "ratio='auto' must be a number"),
        ({"ratio": True}, "ratio=True must be a number"),
        ({"num_tokens": "4"}, "num_tokens='4' must be an integer"),
        ({"num_tokens": 2.5}, "num_tokens=2.5 must be an integer"),
        ({"ratio": 0.3, "chunk_size": "auto"}, "chunk_size='auto' must be an integer"),
        ({"ratio": 0.3, "seed": None}, "seed=None must be an integer"),
        ({"ratio": 0.3, "prefer_labels": "no"}, "prefer_labels='no' must be True or False"),
        ({"ratio": 0.3, "checkpoint_mlp": 1}, "checkpoint_mlp=1 must be True or False"),
        ({"ratio": 0.3, "always": ("first",)}, "a position of always='first' must be an integer"),
        ({"ratio": 0.3, "pattern": "spiral"}, "pattern='spiral' must be one of random, chunks, block"),
        ({"ratio": 0.3, "chunk_size": 0}, "chunk_size=0 must be at least 1"),
        ({"ratio": 0.3, "always": (0, 0)}, r"always=\(0, 0\) names a position twice"),
    ],
)
def test_bad_settings_are_refused_with_their_value_and_rule(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        st.TokenTune(**settings)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        st.TokenTune(ratio=0.3).ratio = 0.5  # type: ignore[misc]
