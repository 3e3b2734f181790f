"""Flags of the HTTP side: what contradicts itself is refused in one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import parse_coordinator, parse_serve
from common.errors import BadConfiguration
from common.flags import to_argv, visible_fields
from common.http_settings import HttpSettings


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ssl-keyfile", "k"], ["TLS needs a certificate", "--ssl-certfile"]),
        (["--ssl-ca-certs", "c"], ["--ssl-certfile"]),
        (["--ssl-cert-reqs", "2", "--ssl-certfile", "c"], ["--ssl-cert-reqs 2", "--ssl-ca-certs"]),
        (["--ssl-cert-reqs", "3"], ["--ssl-cert-reqs"]),
        (["--allowed-origins", "*", "--allow-credentials"], ["--allow-credentials", "name the origins"]),
        (["--allowed-origins", "a b"], ["--allowed-origins", "repeat the flag"]),
        (["--allowed-origins", '["a'], ["--allowed-origins", "JSON"]),
        (["--allowed-headers", "a\r\nx: y"], ["--allowed-headers"]),
        (["--max-buffered-bytes", "1"], ["--max-buffered-bytes"]),
        (["--max-concurrent-requests", "0"], ["--max-concurrent-requests"]),
        (["--head-timeout", "0"], ["--head-timeout"]),
        (["--write-timeout", "nan"], ["--write-timeout"]),
    ],
)
def test_a_contradiction_is_refused_in_one_line(argv: list[str], words: list[str]) -> None:
    with pytest.raises(BadConfiguration) as refused:
        parse_serve(argv, {})
    assert "\n" not in refused.value.message
    assert [word for word in words if word not in refused.value.message] == []


def test_origins_are_repeated_or_a_json_list_as_vllm_has_it() -> None:
    argv = ["--allowed-origins", "https://a", "--allowed-origins", '["https://b", "https://c"]']
    assert parse_serve(argv, {}).allowed_origins == ("https://a", "https://b", "https://c")
    assert parse_serve([], {}).allowed_origins == ()


def test_a_file_may_name_them_too(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'allowed_origins = ["https://a"]\nallow_credentials = true\nhead_timeout = 3\n'
    )
    settings = parse_serve(["--config", str(tmp_path / "c.toml")], {})
    assert settings.allowed_origins == ("https://a",) and settings.head_timeout == 3


def test_the_coordinator_gets_what_serve_was_told() -> None:
    argv = [
        "--allowed-origins",
        "https://a",
        "--allowed-methods",
        "GET",
        "--ssl-certfile",
        "c",
        "--write-timeout",
        "7",
    ]
    told = parse_serve(argv, {})
    names = visible_fields(HttpSettings)
    heard = parse_coordinator(to_argv(told, names), {})
    assert {name: getattr(heard, name) for name in names} == {name: getattr(told, name) for name in names}


def test_keys_in_clear_are_known() -> None:
    away = ["--host", "0.0.0.0", "--api-key", "k"]
    assert parse_serve(away, {}).keys_in_clear
    assert not parse_serve([*away, "--ssl-certfile", "c"], {}).keys_in_clear
    assert not parse_serve(["--api-key", "k"], {}).keys_in_clear
