"""Which tier a request is of, and how far it may move from its class."""

from __future__ import annotations

import pytest

from common.config import Tier
from common.errors import BadRequest, UnsupportedField
from coordinator.tiers import Tiers

TIERS = Tiers(
    {
        "default": Tier(),
        "interactive": Tier(priority=-5, weight=4, ttft_ms=250, itl_ms=50),
        "batch": Tier(priority=3),
        "narrow": Tier(priority=3, max_priority_offset=2),
    },
    {"key-gold": "interactive"},
)


@pytest.mark.parametrize(
    ("service_tier", "tenant", "expected"),
    [
        (None, None, "default"),
        ("auto", None, "default"),
        (None, "key-other", "default"),
        (None, "key-gold", "interactive"),
        ("auto", "key-gold", "interactive"),
        ("default", "key-gold", "default"),
        ("batch", "key-gold", "batch"),
        ("batch", None, "batch"),
    ],
)
def test_what_the_request_names_then_the_keys_then_the_default(
    service_tier: str | None, tenant: str | None, expected: str
) -> None:
    assert TIERS.named(service_tier, tenant) == expected


def test_what_a_tier_gives() -> None:
    assert (TIERS.weight("interactive"), TIERS.ttft_s("interactive"), TIERS.itl_s("interactive")) == (
        4,
        0.25,
        0.05,
    )
    assert (TIERS.weight("batch"), TIERS.ttft_s("batch"), TIERS.itl_s("batch")) == (1, None, None)
    assert Tiers().names == ("default",)
    with pytest.raises(UnsupportedField, match="one of: auto, default, interactive, batch, narrow"):
        TIERS.named("gold", "key-gold")


@pytest.mark.parametrize(
    ("tier", "lets", "refuses", "says"),
    [
        ("interactive", [0, 1000], [-1, -1000], "0 is the least in.*tiers.interactive.max_priority_offset"),
        ("default", [-4, 0, 1000], [-5, -6], "-4 is the least"),
        ("batch", [-2, 7], [-3, -8], "-2 is the least"),
        ("narrow", [-2, 2], [-3, 3], "by 2 at most"),
    ],
)
def test_bounds_of_priority(tier: str, lets: list[int], refuses: list[int], says: str) -> None:
    for asked in lets:
        assert TIERS.priority(tier, asked) == TIERS.priority(tier, 0) + asked
    for asked in refuses:
        with pytest.raises(BadRequest, match=says) as error:
            TIERS.priority(tier, asked)
        assert error.value.param == "priority" and f"is {asked}" in error.value.message


def test_priority_has_no_bound_for_whoever_has_the_service_to_itself() -> None:
    assert Tiers(one_tenant=True).priority("default", -1000) == -1000
    with pytest.raises(BadRequest, match="0 is the least in tier default"):
        Tiers().priority("default", -1)
    bounded = Tiers({"default": Tier(max_priority_offset=2)}, one_tenant=True)
    with pytest.raises(BadRequest, match="by 2 at most"):
        bounded.priority("default", -3)
