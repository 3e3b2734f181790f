"""What the programs of bench/ say before they measure: a bad flag is named, and a picture that cannot be drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import kernel_speed, overhead, pictures, transfer_speed
from bench.against_peer import __main__ as against_peer
from bench.load import command

PEER = ["--model", "m", "--out", "o", "--estimate"]


@pytest.mark.parametrize(
    ("main", "argv", "said"),
    [
        (kernel_speed.main, ["--tiny", "--threads", "0"], "--threads"),
        (kernel_speed.main, ["--tiny", "--seconds", "-1"], "--seconds"),
        (kernel_speed.main, ["--tiny", "--seconds", "nan"], "--seconds"),
        (kernel_speed.main, ["--model", "/nowhere"], "--model: /nowhere"),
        (transfer_speed.main, ["--blocks", "0"], "--blocks"),
        (transfer_speed.main, ["--block-bytes", "-5"], "--block-bytes"),
        (transfer_speed.main, ["--rounds", "x"], "--rounds"),
        (transfer_speed.main, ["--json", "/nowhere/a.json"], "--json"),
        (overhead.main, ["--without-front", "--running", "0"], "--running"),
        (overhead.main, ["--without-front", "--transfers", "-1"], "--transfers"),
        (overhead.main, ["--without-front", "--png", "/"], "--png"),
        (against_peer.main, [*PEER, "--alternations", "0"], "--alternations"),
        (against_peer.main, [*PEER, "--goodput-requests", "-3"], "--goodput-requests"),
    ],
)
def test_a_bad_value_is_named_before_anything_runs(
    main: Callable[[Sequence[str]], int], argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_model_that_cannot_be_had_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Nobody"]}))
    assert kernel_speed.main(["--model", str(tmp_path)]) == 4
    assert overhead.main(["--model", "/nowhere"]) == 4
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "kernel_speed", "python -m bench.overhead",
    ]  # fmt: skip


def test_a_picture_without_matplotlib_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    clone, png = ".venv/bin/pip install -e '.[bench]'", str(tmp_path / "a.png")
    assert clone in pictures.why_no_picture()
    assert command.main(["--plot", png]) == 2
    assert f"--plot: needs matplotlib: {clone}" in capsys.readouterr().err
    for main in (overhead.main, transfer_speed.main):
        with pytest.raises(SystemExit):
            main(["--png", png])
        assert clone in capsys.readouterr().err
    assert against_peer.main(PEER) == 0, "which measures without"
    assert clone in capsys.readouterr().out
    monkeypatch.setattr(pictures, "project_root", lambda: tmp_path)
    assert "pip install 'kvferry[bench]'" in pictures.why_no_picture(), "where it was installed from a wheel"
