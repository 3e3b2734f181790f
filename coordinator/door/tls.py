"""TLS of the HTTP side: the service's context, the context of those who ask it, and a trial of the two.

Every fault of a file is found here, before a worker is started, and named with the flag that gave it. The trial is a
handshake in memory: whether a client would be let in, and whether the certificate names the host, is not guessed.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from common.errors import BadConfiguration
from common.http_settings import HttpSettings


def server_context(settings: HttpSettings) -> ssl.SSLContext | None:
    """None where HTTP is plain. Raises BadConfiguration, which names the flag and the file."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_pair(context, settings.ssl_certfile, settings.ssl_keyfile)
    if settings.ssl_ca_certs is not None:
        _load_authorities(context, "--ssl-ca-certs", settings.ssl_ca_certs)
    context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    return context


def own_client_context(settings: HttpSettings, *, check_name: bool = False) -> ssl.SSLContext | None:
    """For asking our own service: trusts its certificate alone, and brings it along where clients need one."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = check_name
    # The certificate itself is the anchor, whoever signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _load_authorities(context, "--ssl-certfile", settings.ssl_certfile)
    if settings.ssl_cert_reqs:
        _load_pair(context, settings.ssl_certfile, settings.ssl_keyfile)
    return context


def client_context(ca_certs: str | None, *, insecure: bool) -> ssl.SSLContext:
    """For asking a service elsewhere: by the system's authorities, by those of a file, or unchecked."""
    context = ssl.create_default_context()
    if ca_certs is not None:
        _load_authorities(context, "--ca-certs", ca_certs)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def why_refused(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> str:
    """What ends a handshake between the two where the client asks for `host`; "" when nothing does."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname=host)
    asked = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):  # more turns than a handshake has
        for side in (asking, asked):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return getattr(error, "verify_message", "") or error.reason or str(error)
    return ""


def _load_pair(context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
    _require_readable("--ssl-certfile", certfile)
    if keyfile is not None:
        _require_readable("--ssl-keyfile", keyfile)
    key = f"--ssl-keyfile {keyfile}" if keyfile is not None else "its key, for which there is --ssl-keyfile"

    def no_password() -> str:
        raise BadConfiguration(f"{key}: is encrypted, and nobody is there to be asked for its password")

    try:
        context.load_cert_chain(certfile, keyfile, no_password)
    except ssl.SSLError as error:
        raise BadConfiguration(
            f"--ssl-certfile {certfile} and {key}: are no PEM pair of certificate and key ({error.reason or error})"
        ) from None


def _load_authorities(context: ssl.SSLContext, flag: str, path: str) -> None:
    _require_readable(flag, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise BadConfiguration(
            f"{flag} {path}: holds no certificate in PEM ({error.reason or error})"
        ) from None


def _require_readable(flag: str, path: str) -> None:
    """The library does not say which file it could not read."""
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise BadConfiguration(f"{flag} {path}: cannot be read: {error.strerror}") from error
