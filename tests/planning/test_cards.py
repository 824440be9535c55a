import pytest

from slivertune.planning.cards import Rates, card_named, known_cards


def test_every_card_has_a_source_and_rates_that_are_possible() -> None:
    assert len(known_cards()) >= 6
    for card in known_cards().values():
        assert card.source and card.name
        # Operations, bytes of memory, bytes over the bus: each is many times the next.
        assert card.peak_flops > 50 * card.memory_bandwidth > 1000 * card.bus_bandwidth > 0
        assert card.memory_bytes > 20e9


def test_a_4090_reaches_99_tflops_at_the_default_efficiency() -> None:
    rates = card_named("4090").rates(bus_bandwidth=25e9)
    assert rates.flops == pytest.approx(99.12e12) and rates.bus_bandwidth == 25e9 and rates.duplex == "full"
    assert card_named("4090").rates(efficiency=0.5).flops == pytest.approx(82.6e12)
    assert card_named("4090").rates(duplex="half").bus_bandwidth == pytest.approx(0.8 * 32e9)


def test_a_card_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match=r"5090.*'4090'"):
        card_named("5090")


@pytest.mark.parametrize(
    "wrong", [{"flops": 0}, {"bus_bandwidth": -1}, {"host_bandwidth": 0}, {"duplex": "both"}, {"memory_bandwidth": 0}]
)
def test_rates_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    name, value = next(iter(wrong.items()))
    given: dict[str, object] = {"flops": 1.0, "memory_bandwidth": 1.0, "bus_bandwidth": 1.0, **wrong}
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        Rates(**given)  # type: ignore[arg-type]
