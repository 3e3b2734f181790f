"""TLS: what is wrong with its files is said before anything starts; who asks is let in as the flags say."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.config import parse_coordinator, parse_serve
from common.errors import BadConfiguration
from coordinator import admin_client, cli
from coordinator.door.tls import client_context, own_client_context, server_context, why_refused
from coordinator.http_api import create_app
from coordinator.launcher import make_plan, own_client, ready_lines, tls_in_words
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import ScriptedGateway, Served, serving


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=30)


def certificate(folder: Path, name: str, alt_name: str) -> tuple[Path, Path]:
    """A self-signed one, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    openssl(
        *(
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ),
        *("-subj", f"/CN={name}", "-addext", f"subjectAltName={alt_name}", "-keyout", key, "-out", cert),
    )
    return cert, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    certificate(folder, "local", "IP:127.0.0.1,DNS:localhost")
    certificate(folder, "elsewhere", "DNS:llm.example.com")
    openssl(
        "pkey", "-aes128", "-passout", "pass:x", "-in", folder / "local.key", "-out", folder / "locked.key"
    )
    (folder / "both.pem").write_text((folder / "local.pem").read_text() + (folder / "local.key").read_text())
    (folder / "noise.pem").write_text("no certificate")
    return folder


def flags(files: Path, name: str = "local", *more: str) -> list[str]:
    return ["--ssl-certfile", str(files / f"{name}.pem"), "--ssl-keyfile", str(files / f"{name}.key"), *more]


@pytest.mark.parametrize(
    ("cert", "key", "words"),
    [
        ("absent.pem", "local.key", ["--ssl-certfile", "absent.pem", "No such file"]),
        ("local.pem", "absent.key", ["--ssl-keyfile", "absent.key", "No such file"]),
        (
            "local.pem",
            "elsewhere.key",
            ["--ssl-certfile", "local.pem", "elsewhere.key", "KEY_VALUES_MISMATCH"],
        ),
        ("noise.pem", "local.key", ["--ssl-certfile", "noise.pem"]),
        ("local.pem", "noise.pem", ["--ssl-keyfile", "noise.pem"]),
        ("local.pem", "locked.key", ["--ssl-keyfile", "locked.key", "encrypted"]),
        ("local.pem", None, ["local.pem", "--ssl-keyfile"]),
    ],
)
def test_a_bad_pair_is_named(files: Path, cert: str, key: str | None, words: list[str]) -> None:
    argv = ["--ssl-certfile", str(files / cert), *(["--ssl-keyfile", str(files / key)] if key else [])]
    with pytest.raises(BadConfiguration) as refused:
        server_context(parse_coordinator(argv, {}))
    assert refused.value.exit_code == 2
    assert [word for word in words if word not in refused.value.message] == []


def test_authorities_that_are_none_are_named(files: Path) -> None:
    argv = flags(files, "local", "--ssl-ca-certs", str(files / "noise.pem"), "--ssl-cert-reqs", "2")
    with pytest.raises(BadConfiguration, match=r"--ssl-ca-certs .*noise\.pem"):
        server_context(parse_coordinator(argv, {}))


def test_a_key_in_the_file_of_the_certificate_will_do(files: Path) -> None:
    settings = parse_coordinator(["--ssl-certfile", str(files / "both.pem")], {})
    assert server_context(settings) is not None


def test_serve_says_so_before_it_starts_anything(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["serve", "--model", "no/such-model-at-all", *flags(files, "absent")]
    assert cli.main(argv) == 2
    assert "absent.pem" in capsys.readouterr().err


def test_serve_that_would_not_be_let_in_by_its_own_coordinator_says_so(files: Path) -> None:
    for authority, let_in in (("local", True), ("elsewhere", False)):
        argv = flags(
            files, "local", "--ssl-ca-certs", str(files / f"{authority}.pem"), "--ssl-cert-reqs", "2"
        )
        settings = parse_serve(argv, {})
        if let_in:
            assert own_client(settings) is not None
        else:
            with pytest.raises(BadConfiguration, match="would not take it"):
                own_client(settings)


def test_a_client_without_a_certificate_is_refused_where_one_is_needed(files: Path) -> None:
    argv = flags(files, "local", "--ssl-ca-certs", str(files / "local.pem"), "--ssl-cert-reqs")
    stranger = client_context(str(files / "local.pem"), insecure=False)
    for wanted, refused in (("0", False), ("1", False), ("2", True)):
        server = server_context(parse_coordinator([*argv, wanted], {}))
        assert server is not None
        assert bool(why_refused(server, stranger, "localhost")) == refused


def test_the_url_and_the_line_to_try_speak_tls(files: Path) -> None:
    settings = parse_serve([*flags(files), "--port", "8123"], {})
    plan = make_plan(settings)
    for held in plan.held:
        held.close()
    assert plan.url == "https://127.0.0.1:8123"
    coordinator = parse_coordinator([arg for arg in plan.specs[0].argv[4:] if "{" not in arg], {})
    assert (
        coordinator.ssl_certfile == settings.ssl_certfile and coordinator.ssl_keyfile == settings.ssl_keyfile
    )
    pem = files / "local.pem"
    lines = ready_lines(plan.url, "m", "", tls_in_words(settings))
    assert lines[-1].startswith(f"  curl --cacert {pem} https://127.0.0.1:8123/v1/chat/completions")
    assert f"status kvferry status --url https://127.0.0.1:8123 --ca-certs {pem}" in lines
    assert tls_in_words(parse_serve(flags(files, "elsewhere"), {})) == "--insecure"
    assert tls_in_words(parse_serve([], {})) == ""


@pytest.fixture(scope="module")
def secure(files: Path, tokenizer: Tokenizer) -> Iterator[Served]:
    gateway = ScriptedGateway()
    app = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",))
    tls = server_context(parse_coordinator(flags(files), {}))
    with serving(app, gateway, tls=tls) as served:
        yield served


def test_answers_and_streams_over_tls(files: Path, secure: Served) -> None:
    secure.gateway.answers(*[260] * 500)
    trust = client_context(str(files / "local.pem"), insecure=False)
    with httpx.Client(base_url=f"https://127.0.0.1:{secure.port}", verify=trust) as client:
        assert client.get("/health").json() == {"status": "ok"}
        text = client.post(
            "/v1/completions", json={"model": "smol", "prompt": "hi", "stream": True, "max_tokens": 500}
        ).text
    assert text.count("data: ") == 502 and text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"https://127.0.0.1:{secure.port}/health")
    assert httpx.get(f"https://127.0.0.1:{secure.port}/health", verify=False).status_code == 200


def test_status_trusts_whom_it_is_told_to(
    files: Path, secure: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"https://127.0.0.1:{secure.port}"
    pem = str(files / "local.pem")
    assert cli.main(["status", "--url", url, "--ca-certs", pem]) == 0
    assert "decode-0" in capsys.readouterr().out
    assert cli.main(["status", "--url", url, "--insecure"]) == 0
    assert cli.main(["status", "--url", url]) == 1
    assert "--ca-certs" in capsys.readouterr().err
    assert cli.main(["status", "--url", url.replace("https", "http")]) == 1
    assert "https://" in capsys.readouterr().err
    assert cli.main(["status", "--url", url, "--ca-certs", str(files / "noise.pem")]) == 2
    assert "noise.pem" in capsys.readouterr().err


def test_the_launcher_trusts_its_own_certificate_alone(files: Path, secure: Served) -> None:
    url = f"https://127.0.0.1:{secure.port}"
    ours = own_client_context(parse_coordinator(flags(files), {}))
    other = own_client_context(parse_coordinator(flags(files, "elsewhere"), {}))
    assert isinstance(ours, ssl.SSLContext) and admin_client.health(url, tls=ours).ok
    with pytest.raises(admin_client.Unreachable):
        admin_client.health(url, tls=other)
