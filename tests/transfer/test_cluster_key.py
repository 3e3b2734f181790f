"""The key file: made once and for its owner alone; whatever is wrong with one is said, and its secret never."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from common.config import parse_coordinator, parse_serve, parse_worker
from common.errors import BadConfiguration
from coordinator import keys_command
from coordinator.launcher import make_plan, serve
from transfer.cluster_key import new_key, read_key

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.key"


def fault(path: Path) -> str:
    with pytest.raises(BadConfiguration) as refused:
        read_key(path)
    assert refused.value.exit_code == 2 and str(path) in refused.value.message
    return refused.value.message


def test_a_new_key_is_its_owners_alone_and_is_read_back(file: Path) -> None:
    before = os.umask(0)
    try:
        made = new_key(file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_key(file) == made and zmq.curve_public(made.secret) == made.public
    assert made.secret.decode() not in repr(made)


def test_a_file_that_is_there_is_left_as_it_is(file: Path, tmp_path: Path) -> None:
    file.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    for taken in (file, link):
        with pytest.raises(BadConfiguration, match="is there already"):
            new_key(taken)
    assert file.read_text() == "precious" and not (tmp_path / "target").exists()
    with pytest.raises(BadConfiguration, match="cannot be made: No such file"):
        new_key(tmp_path / "nowhere" / "key")


def test_half_a_key_stands_in_nobodys_way(file: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(BadConfiguration, match="cannot be written"):
            new_key(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not file.exists()
    new_key(file)


def test_faults_are_named(file: Path) -> None:
    assert "kvferry keys new FILE" in fault(file)
    other = new_key(file.with_name("other"))
    new_key(file)
    text = file.read_text()
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        assert f"chmod 600 {file}" in fault(file)
    file.chmod(0o600)
    (line,) = [line for line in text.splitlines() if line.startswith("public")]
    file.write_text(text.replace(line, f'public = "{other.public.decode()}"'))
    assert "do not belong together" in fault(file)
    assert "cannot be read: Is a directory" in fault(file.parent)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "public = 1\nsecret = 2",
        'secret = "S3CRET"',
        'public = "{}"\nsecret = "{}"\nmore = 1',
        'public = "{}',
        "public: {}\nsecret: {}",
        'public = "{}x"\nsecret = "{}"',
        'public = "~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~"\nsecret = "{}"',
        'public = "########################################"\nsecret = "{}"',
        "\xff\x00",
        "x = 1\n" * 2000,
    ],
)
def test_what_is_no_key_is_not_repeated(file: Path, text: str) -> None:
    secret = zmq.curve_keypair()[1].decode()
    file.write_text(text.replace("{}", secret), encoding="latin-1")
    file.chmod(0o600)
    message = fault(file)
    assert "is no key of kvferry" in message and secret not in message and "S3CRET" not in message


def test_the_command_says_what_to_do_next_and_never_the_secret(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys_command.run(["new", str(file)]) == 0
    said = capsys.readouterr().out
    key = read_key(file)
    assert (
        key.public.decode() in said and f"--curve-key {file}" in said and "Copy it to every machine" in said
    )
    assert keys_command.run(["show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown == f"public {key.public.decode()}\n"
    assert key.secret.decode() not in said + shown


def test_every_command_ends_with_2_where_the_key_is_at_fault(file: Path) -> None:
    file.write_text("nonsense")
    file.chmod(0o644)
    for module in ("prefill_node", "coordinator"):
        ended = subprocess.run(
            [sys.executable, "-m", module, "--curve-key", str(file), "--model", str(file.parent)],
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ended.returncode == 2 and f"chmod 600 {file}" in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr
    with pytest.raises(BadConfiguration, match="chmod 600"):
        serve(parse_serve(["--curve-key", str(file)], {}))


def test_serve_gives_its_children_the_file_and_not_what_is_in_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key(file)
    monkeypatch.chdir(file.parent)
    plan = make_plan(parse_serve(["--curve-key", file.name, "--model", "m", "--port", "0"], {}))
    for spec in plan.specs:
        assert f"--curve-key={file}" in spec.argv
        assert key.secret.decode() not in " ".join(spec.argv) + str(spec.environ)
    for held in plan.held:
        held.close()


README = Path(__file__).parents[2] / "README.md"
TWO_MACHINES = """
kvferry coordinator --control tcp://10.0.0.1:8701 --tokens-port 8702 --curve-key cluster.key
kvferry decode --coordinator tcp://10.0.0.1:8701 --curve-key cluster.key --advertise 10.0.0.1:8705
kvferry prefill --coordinator tcp://10.0.0.1:8701 --curve-key cluster.key --advertise 10.0.0.2:8703
"""


def test_the_commands_for_two_machines_are_taken() -> None:
    """As the README writes them. Each worker says its ports, which a firewall is to let through."""
    assert TWO_MACHINES.strip() in README.read_text("utf-8").replace("# on 10.0.0.2\n", "")
    coordinator, decode, prefill = (line.split()[2:] for line in TWO_MACHINES.strip().splitlines())
    assert parse_coordinator(coordinator, {}).tokens_port == 8702
    assert parse_worker(decode, "decode").coordinator == "tcp://10.0.0.1:8701"
    assert parse_worker(decode, "decode").advertise == "10.0.0.1:8705"
    assert parse_worker(prefill, "prefill").advertise == "10.0.0.2:8703"
