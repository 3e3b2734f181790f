"""What web pages may do at the service: whoever visits one must not drain a worker by it. Pure.

A browser sends what a page asks for to any address that its visitor reaches, loopback and the operators' network too,
and a POST without a body or with a text needs no preflight: CORS keeps the page from reading the answer, not from
asking. So what changes the cluster is not taken from pages of other origins. Browsers say where a request comes from,
in headers that a page cannot set; what says nothing is no browser, and is let through.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

GUARDED = "/admin/"
READS = ("GET", "HEAD", "OPTIONS")
_FROM_HERE = (b"same-origin", b"none")


def comes_from_elsewhere(
    method: str, path: str, scheme: str, headers: Mapping[bytes, bytes], allowed: Container[str]
) -> bool:
    """Whether a page of another origin asks to change something. `allowed`: origins, or `*`, by --allowed-origins."""
    if method in READS or not path.startswith(GUARDED):
        return False
    origin = headers.get(b"origin")
    if origin is not None and ("*" in allowed or origin.decode("latin-1") in allowed):
        return False
    site = headers.get(b"sec-fetch-site", b"").strip().lower()
    if site:  # the browser knows: a proxy before us may have ended TLS, so that our scheme is not the page's
        return site not in _FROM_HERE
    return origin is not None and origin != scheme.encode() + b"://" + headers.get(b"host", b"")
