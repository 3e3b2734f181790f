"""Which tier serves a request, and what a request may ask of it."""

from __future__ import annotations

from collections.abc import Mapping

from common.config import Tier
from common.errors import BadRequest, UnsupportedField
from coordinator.errors_http import shown

OF_THE_KEY = (None, "auto")
"""Words for the tier of whoever asks: the key's, else the default one."""


class Tiers:
    """The configured tiers, the first being the default one. `of_tenants`: tiers of the tenants whose key has one."""

    def __init__(
        self, tiers: Mapping[str, Tier] | None = None, of_tenants: Mapping[str, str] | None = None
    ) -> None:
        self._tiers = dict(tiers or {"default": Tier()})
        self._of_tenants = dict(of_tenants or {})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tiers)

    def named(self, service_tier: str | None, tenant: str | None) -> str:
        """The tier that a request names, or that is its tenant's. Raises UnsupportedField."""
        default = "default" if "default" in self._tiers else next(iter(self._tiers))
        if service_tier in OF_THE_KEY:
            return self._of_tenants.get(tenant or "", default)
        if service_tier == "default":
            return default
        if service_tier in self._tiers:
            return service_tier
        raise UnsupportedField(
            f"service_tier: {shown(str(service_tier))!r} is not a tier of this server. Leave it out, or use one "
            f"of: {', '.join(dict.fromkeys(('auto', 'default', *self._tiers)))}.",
            param="service_tier",
            code="unsupported_value",
        )

    def priority(self, name: str, asked: int) -> int:
        """The class of a request of this tier that asks for so much later (above 0) or sooner. Raises BadRequest."""
        tier = self._tiers[name]
        bound = tier.max_priority_offset
        if bound is not None and abs(asked) > bound:
            raise _beyond(asked, f"tier {name} lets a request move by {bound} at most")
        before = max((t.priority for t in self._tiers.values() if t.priority < tier.priority), default=None)
        if bound is None and before is not None and tier.priority + asked <= before:
            least = before + 1 - tier.priority
            raise _beyond(
                asked, f"tier {name} may not reach a tier that is served before it; {least} is the least"
            )
        return tier.priority + asked

    def weight(self, name: str) -> float:
        return self._tiers[name].weight

    def ttft_s(self, name: str) -> float | None:
        """Its target for the first token."""
        return _seconds(self._tiers[name].ttft_ms)

    def itl_s(self, name: str) -> float | None:
        """Its target for every later gap."""
        return _seconds(self._tiers[name].itl_ms)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _beyond(asked: int, why: str) -> BadRequest:
    return BadRequest(f"priority: is {asked}; {why}.", param="priority", code="invalid_value")
