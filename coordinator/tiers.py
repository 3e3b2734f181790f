"""Which tier serves a request, and what a request may ask of it.

Why `priority` has a bound where nobody set one: classes are served strictly, lower first, so one client that puts its
own requests before everybody's shuts all others out. A request may make itself worse as far as it likes; better only up
to just behind the tier that is served before its own, and where there is none, not at all. Whoever has the service to
itself shuts out nobody: there `priority` has no bound, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.config import Tier
from common.errors import BadRequest, UnsupportedField
from coordinator.errors_http import quoted

OF_THE_KEY = (None, "auto")
"""Words for the tier of whoever asks: the key's, else the default one."""


class Tiers:
    """The configured tiers, the first being the default one. `of_tenants`: tiers of the tenants whose key has one.
    `one_tenant`: no tenant or tier is there that another one could shut out."""

    def __init__(
        self,
        tiers: Mapping[str, Tier] | None = None,
        of_tenants: Mapping[str, str] | None = None,
        *,
        one_tenant: bool = False,
    ) -> None:
        self._tiers = dict(tiers or {"default": Tier()})
        self._of_tenants = dict(of_tenants or {})
        self._one_tenant = one_tenant

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
            f"service_tier: {quoted(str(service_tier))} is not a tier of this server. Leave it out, or use one "
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
        if bound is None and not self._one_tenant and asked < (least := self._least(tier)):
            why = (
                "one less would reach a tier that is served before it"
                if least
                else "none is served before it"
            )
            raise _beyond(
                asked,
                f"{least} is the least in tier {name} ({why}). Whoever runs the service sets another bound as "
                f"tiers.{name}.max_priority_offset",
            )
        return tier.priority + asked

    def _least(self, tier: Tier) -> int:
        """How far sooner (below 0) a request may be asked for where its tier has no bound of its own."""
        before = max((t.priority for t in self._tiers.values() if t.priority < tier.priority), default=None)
        return 0 if before is None else before + 1 - tier.priority

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
