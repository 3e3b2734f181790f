"""The bench of overheads runs, with small sizes, and its figures are of what they say. None is judged: a command is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import overhead
from bench.overhead import Sizes, main, measure
from bench.overhead_coordinator import RequestCost, request_cost
from bench.overhead_front import front_costs
from bench.overhead_workers import decode_cost


def test_every_part_is_measured_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--running", "2", "--in-line", "1", "--transfers", "1", "--waiting", "12"]
    monkeypatch.setattr(
        overhead, "request_cost", lambda waiting: request_cost(waiting, requests=20, rounds=2)
    )
    written = tmp_path / "overhead.json"
    assert main([*sizes, "--without-front", f"--json={written}"]) == 0
    result = json.loads(written.read_text())
    assert [row["what"].split(",")[0] for row in result["rows"]] == [
        "decode worker", "prefill worker", "transfer", "coordinator",
    ]  # fmt: skip
    for row in result["rows"]:
        figures = {name: value for name, value in row.items() if name.endswith("_us")}
        assert figures and all(value > 0 for value in figures.values()), row
    assert result["surroundings"]["cores"] > 0
    assert "per step" in capsys.readouterr().out


def test_a_step_whose_tokens_are_too_many_for_one_message_is_measured_too() -> None:
    cost = decode_cost(2000, rounds=1)
    assert cost.running == 2000 and cost.encode_us > 0


def test_the_front_is_a_real_coordinator(smollm2_dir: Path) -> None:
    """Every stream comes to its end, which the bench itself asserts."""
    alone, together = front_costs(smollm2_dir, (1, 4), steps=4, step_s=0.01)
    assert (alone.streams, together.streams) == (1, 4)
    assert min(alone.token_us, together.token_us, together.request_us) > 0


def test_what_waits_makes_a_request_no_dearer() -> None:
    """Fifty times as many: four times as dear is what neighbours may make of it."""
    short, long = [request_cost(waiting, requests=40, rounds=4) for waiting in (100, 5000)]
    assert isinstance(long, RequestCost)
    assert long.dispatch_us < 4 * short.dispatch_us and long.look_us < 4 * short.look_us, (short, long)


def test_without_a_model_nothing_is_started() -> None:
    sizes = Sizes(running=(), in_line=(), transfers=(), waiting=(), streams=(1,))
    assert list(measure(sizes, None)) == []
