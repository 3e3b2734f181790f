"""`kvferry status`: the workers of a running service, in a table."""

from __future__ import annotations

import argparse
import os
import sys

from common.http_settings import API_KEY_VARIABLE
from coordinator import admin_client
from coordinator.admin_client import DEFAULT_URL
from coordinator.door.tls import client_context


def run(argv: list[str]) -> int:
    """0 where it serves, else 1. Raises BadConfiguration."""
    parser = argparse.ArgumentParser(prog="kvferry status", description="The workers of a running service.")
    parser.add_argument("--url", default=DEFAULT_URL, help="the service (default: %(default)s)")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"where the service asks for one; or set {API_KEY_VARIABLE}"
    )
    parser.add_argument("--ca-certs", metavar="FILE", help="who may have signed its certificate, PEM")
    parser.add_argument("--insecure", action="store_true", help="take any certificate")
    given = parser.parse_args(argv)
    tls = client_context(given.ca_certs, insecure=given.insecure)
    url = given.url.rstrip("/")
    key = given.api_key or os.environ.get(API_KEY_VARIABLE, "").split(",")[0] or None
    console = admin_client.wide_console()
    try:
        console.print(admin_client.workers_table(admin_client.workers(url, key, tls)))
        health = admin_client.health(url, key, tls)
    except admin_client.Unreachable as error:
        elsewhere = " (a service elsewhere: --url http://HOST:PORT)" if given.url == DEFAULT_URL else ""
        print(f"kvferry status: {error}{elsewhere}", file=sys.stderr)  # noqa: T201
        return 1
    console.print("serving" if health.ok else f"not serving: {health.reason}", markup=False)
    return 0 if health.ok else 1
