import pytest

from slivertune.planning.cards import card_named, known_cards


def test_every_card_has_a_source_and_rates_that_are_possible() -> None:
    assert len(known_cards()) >= 22
    for card in known_cards().values():
        assert card.source and card.name
        # Operations, bytes of memory, bytes over the bus: each is many times the next.
        assert card.peak_flops > 50 * card.memory_bandwidth > 400 * card.bus_bandwidth > 0
        assert card.peak_flops / 30 < card.fp32_flops < card.peak_flops
        assert card.link_bandwidth is None or card.link_bandwidth > 5 * card.bus_bandwidth
        assert card.memory_bytes > 12e9


def test_a_4090_reaches_99_tflops_at_the_default_efficiency() -> None:
    rates = card_named("4090").rates()
    assert rates.flops == pytest.approx(99.12e12) and rates.bus_bandwidth == pytest.approx(0.8 * 32e9)
    assert card_named("4090").rates(efficiency=0.5).flops == pytest.approx(82.6e12)
    assert card_named("4090").rates(in_fp32=True).flops == pytest.approx(0.6 * 82.6e12)
    assert card_named("4090").rates().link_bandwidth is None
    assert card_named("H100").rates().link_bandwidth == pytest.approx(0.8 * 450e9)


def test_a_card_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match=r"5090x.*'4090'"):
        card_named("5090x")
