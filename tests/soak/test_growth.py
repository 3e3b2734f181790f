"""A leak shows as a slope, noise and warming up do not."""

from __future__ import annotations

from random import Random
from typing import cast

import pytest

from tests.e2e.service import Service
from tests.soak.growth import Life, slope_of
from tests.soak.load import Load
from tests.soak.run import Soak, verdict


def test_a_straight_line_is_found_exactly() -> None:
    slope = slope_of([0.0, 1.0, 2.0, 3.0], [5.0, 7.0, 9.0, 11.0])
    assert slope.per_hour == pytest.approx(7200)
    assert slope.plus_minus == pytest.approx(0)


def test_a_leak_shows_through_noise_and_a_flat_life_does_not() -> None:
    random = Random(3)
    flat, leaking = Life("flat", 1), Life("leaking", 2)
    for second in range(400):
        warming = 1000.0 * min(second, 40)
        for life, per_s in ((flat, 0.0), (leaking, 20.0)):
            life.at_s.append(float(second))
            life.anonymous_bytes.append(warming + per_s * second + random.gauss(0, 50))
    assert flat.is_long
    assert leaking.slope(leaking.anonymous_bytes).least > 0.9 * 20 * 3600
    found = flat.slope(flat.anonymous_bytes)
    assert abs(found.per_hour) < 2 * found.plus_minus


def test_a_soak_that_shows_nothing_does_not_pass() -> None:
    load = Load("", [], Random(0))
    soak = Soak(cast(Service, None), load, 0.0)
    assert len(verdict(soak, load)) == 2, "no life was long, nothing was asked"
    steady = Life("decode-0", 1)
    for second in range(300):
        steady.at_s.append(float(second))
        for values in (steady.anonymous_bytes, steady.descriptors, steady.threads):
            values.append(9.0)
    soak.lives[1] = steady
    load.counted["fixed"] = 10
    assert verdict(soak, load) == []
    steady.descriptors[:] = [second / 10 for second in range(300)]
    assert "gains 360 descriptors per hour" in verdict(soak, load)[0]
