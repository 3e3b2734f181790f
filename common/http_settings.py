"""Settings of the coordinator's HTTP side: where it listens, who may come in, how much one client may take."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from common.flags import flag, from_variable, parse_bytes

API_KEY_VARIABLE = "KVFERRY_API_KEY"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_HEADER_WORD = re.compile(r"[!-+\--~]+")
"""What goes into a header as it is: printable ASCII, no blanks, no commas."""


def _checked_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """A key comes in a header, where clients differ in how they encode anything else, if they do not refuse it."""
    if not all(map(_HEADER_WORD.fullmatch, keys)):
        raise ValueError("a key is printable ASCII, with no blanks and no commas")
    return keys


def _read_keys(paths: object) -> object:
    """Paths of key files → the keys in them, so that a file is read once, at the entry point."""
    if isinstance(paths, tuple):  # they were read
        return paths
    several = paths if isinstance(paths, list) else [paths]
    return tuple(key for path in several for key in _keys_in(path))


def _keys_in(path: object) -> list[str]:
    """Never shows a key. Comments may be in any encoding."""
    if not isinstance(path, str):
        raise ValueError("expected the path of a file, in quotes, or several of them in brackets")
    try:
        lines = Path(path).read_bytes().removeprefix(BOM_UTF8).splitlines()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ValueError(f"cannot read it: {error}") from error
    keys: list[str] = []
    for number, line in enumerate(map(bytes.strip, lines), start=1):
        if not line or line.startswith(b"#"):
            continue
        try:
            keys += _checked_keys((line.decode("latin-1"),))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not keys:  # a secret that did not arrive must not open the door
        raise ValueError(f"{path} holds no key")
    return keys


def _one_or_more(values: object) -> object:
    """In a file one value may stand without brackets."""
    return [values] if isinstance(values, str) else values


def _listed(values: object) -> object:
    """Besides being repeated, such a flag may hold a JSON list, which is how vLLM writes it: '["*"]'."""
    values = _one_or_more(values)
    if not isinstance(values, list):
        return values
    found: list[object] = []
    for value in values:
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                found += json.loads(value)
            except ValueError:
                raise ValueError("is no JSON list; give one value, and repeat the flag for more") from None
        else:
            found.append(value)
    return found


def _header_words(values: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(_HEADER_WORD.fullmatch, values)):
        raise ValueError("one value has no blanks and no commas; repeat the flag for more")
    return values


def _readable(path: Path) -> Path:
    """Of a file that another process reads: absolute, and refused here where it cannot be read."""
    try:
        path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read it: {error}") from error
    return path.absolute()


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Keys = Annotated[tuple[str, ...], BeforeValidator(_one_or_more), AfterValidator(_checked_keys)]
KeysOfFiles = Annotated[tuple[str, ...], BeforeValidator(_read_keys), AfterValidator(_checked_keys)]
TextFile = Annotated[Path, AfterValidator(_readable)]
Words = Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_header_words)]


class HttpSettings(Strict):
    """A part of CoordinatorSettings."""

    host: str = flag("127.0.0.1", "address that HTTP listens on", "HTTP")
    port: int = flag(8000, "port that HTTP listens on; 0: any free one", "HTTP", ge=0, le=65535)
    served_model_name: str | None = flag(
        None, "name of the model in requests; absent: last part of --model", "HTTP", metavar="NAME"
    )
    chat_template: TextFile | None = flag(
        None, "jinja template of chats; absent: the model's own", "HTTP", metavar="FILE"
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = flag(
        "auto",
        "how the model writes its tool calls; auto: as its chat template and vocabulary say",
        "HTTP",
    )
    api_key: Keys = flag(
        (),
        "key that requests must bring, may be repeated; each names a tenant. Other users of the machine see this "
        f"flag in its list of processes; they do not see --api-key-file, and {API_KEY_VARIABLE}, which adds more, "
        "separated by commas",
        "HTTP",
    )
    api_key_file: KeysOfFiles = flag(
        (), "file with one key per line, # for comments; may be repeated", "HTTP", metavar="FILE"
    )
    api_key_environment: Keys = from_variable(API_KEY_VARIABLE, default=())
    allow_unauthenticated: bool = flag(False, "let HTTP listen beyond loopback without any key", "HTTP")

    ssl_keyfile: str | None = flag(
        None, "private key of the certificate, PEM; with --ssl-certfile: HTTPS", "TLS", metavar="FILE"
    )
    ssl_certfile: str | None = flag(
        None, "certificate and its chain, PEM; alone: with the key in it", "TLS", metavar="FILE"
    )
    ssl_ca_certs: str | None = flag(
        None, "certificates of those who may sign a client's, PEM", "TLS", metavar="FILE"
    )
    ssl_cert_reqs: int = flag(
        0,
        "certificate of a client: 0 not asked for, 1 checked if it has one, 2 needed",
        "TLS",
        metavar="{0,1,2}",
        ge=0,
        le=2,
    )

    allowed_origins: Words = flag(
        (), "origin whose pages may call this service, or *; may be repeated; absent: no CORS", "CORS"
    )
    allow_credentials: bool = flag(False, "pages may send cookies and other credentials", "CORS")
    allowed_methods: Words = flag(("*",), "method that pages may use, or *; may be repeated", "CORS")
    allowed_headers: Words = flag(("*",), "header that pages may send, or *; may be repeated", "CORS")

    max_body_size: Bytes = flag(
        4 << 20, "longest request body, such as 4MiB", "HTTP limits", metavar="BYTES", ge=1024
    )
    max_buffered_bytes: Bytes = flag(
        1 << 20,
        "what may wait for a client that reads slowly; a stream over it ends with an error",
        "HTTP limits",
        metavar="BYTES",
        ge=1024,
    )
    max_concurrent_requests: int = flag(
        2048, "requests with a body at once, streams included; one more gets 429", "HTTP limits", ge=1
    )
    max_connections: int = flag(
        4096, "open connections; one more takes the place of an idle one, or gets 503", "HTTP limits", ge=1
    )
    head_timeout: float = flag(
        10.0, "seconds for the head of a request", "HTTP limits", gt=0, metavar="SECONDS"
    )
    body_timeout: float = flag(
        30.0, "seconds for the body of a request", "HTTP limits", gt=0, metavar="SECONDS"
    )
    write_timeout: float = flag(
        60.0,
        "seconds after which a client that takes nothing of its answer is dropped",
        "HTTP limits",
        gt=0,
        metavar="SECONDS",
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ValueError("TLS needs a certificate: set --ssl-certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError(
                f"--ssl-cert-reqs {self.ssl_cert_reqs}: set --ssl-ca-certs, by which clients are known"
            )
        return self

    @model_validator(mode="after")
    def _cors_is_safe(self) -> Self:
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "--allow-credentials with --allowed-origins '*' lets every page act for its visitor: name the origins"
            )
        return self

    @property
    def api_keys(self) -> tuple[str, ...]:
        """All keys, each once; empty where requests need none."""
        return tuple(dict.fromkeys((*self.api_key, *self.api_key_file, *self.api_key_environment)))
