"""`python -m bench` as a person types it, against a scripted server: tables, JSON, PNG, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.load import command
from bench.load.bodies import BodyShape
from bench.load.prompts import PromptMaker
from bench.load.records import Planned
from common.paths import project_root
from tests.bench.load.scripted_server import EVENTS, Step, event, scripted, spoken, status

FEW = ["--num-warmups", "1", "--input-len", "12", "--output-len", "4", "--no-progress"]


def bench(url: str, *argv: str) -> int:
    return command.main(["--base-url", url, *FEW, *argv])


def saved(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_run_says_and_saves_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, picture = tmp_path / "a.json", tmp_path / "a.png"
    with scripted(lambda body: spoken(body, first_s=0.02, gap_s=0.01)) as server:
        argv = ["--request-rate", "100", "--num-prompts", "20", "--goodput", "ttft:9000", "itl:9000"]
        assert bench(server.url, *argv, "--save-result", str(result), "--plot", str(picture)) == 0
    said = capsys.readouterr().out
    for word in (
        "20 ok",
        "TTFT",
        "ITL",
        "TPOT",
        "end to end",
        "100.0% of 20 requests",
        "Poisson",
        "seed",
        "of a core",
    ):
        assert word in said
    found = saved(result)
    assert found["summary"]["by_outcome"]["ok"] == 20
    assert found["summary"]["goodput"]["share"]["value"] == 1.0
    assert found["settings"]["seed"] and str(found["settings"]["seed"]) in said
    assert found["service"]["model"] == "scripted"
    assert {"processor", "revision", "libraries"} <= found["surroundings"].keys()
    assert found["client"]["cpu_s"] > 0
    assert [len(row["gaps_ms"]) for row in found["requests"]] == [3] * 20
    assert picture.read_bytes().startswith(b"\x89PNG")
    asked = server.bodies[-20:]
    assert {len(body["prompt"]) for body in asked} == {12}
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies), "no prompt twice"
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in asked)


def test_requests_come_at_the_times_that_were_drawn(tmp_path: Path) -> None:
    result = tmp_path / "a.json"
    with scripted(spoken) as server:
        argv = ["--request-rate", "40", "--num-prompts", "30", "--seed", "5", "--no-server-metrics"]
        assert bench(server.url, *argv, "--save-result", str(result)) == 0
    due_s = [row["due_ms"] / 1e3 for row in saved(result)["requests"]]
    came_s = server.arrived_s[-30:]
    late_s = sorted((came - came_s[0]) - (due - due_s[0]) for came, due in zip(came_s, due_s, strict=True))
    assert max(abs(late_s[len(late_s) // 2]), 0) < 0.03
    assert max(row["sent_ms"] - row["due_ms"] for row in saved(result)["requests"]) < 200


def test_no_more_run_at_once_than_allowed() -> None:
    with scripted(lambda body: spoken(body, gap_s=0.01)) as server:
        argv = ["--request-rate", "inf", "--max-concurrency", "3", "--num-prompts", "12"]
        assert bench(server.url, *argv, "--num-warmups", "0") == 0
    assert server.most_at_once == 3
    assert server.connections <= 5, "connections are kept"


def test_duration_ends_arrivals_and_who_is_there_ends_in_peace(tmp_path: Path) -> None:
    result = tmp_path / "a.json"
    with scripted(lambda body: spoken(body, gap_s=0.1)) as server:
        assert (
            bench(server.url, "--request-rate", "40", "--duration", "0.5", "--save-result", str(result)) == 0
        )
    found = saved(result)["summary"]
    assert found["by_outcome"]["ok"] == sum(found["by_outcome"].values()) > 5
    assert found["duration_s"] > 0.5


def test_duration_ends_a_closed_loop_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All its requests are due at once, so by their times it would never end."""
    result = tmp_path / "a.json"
    closed = ["--request-rate", "inf", "--duration", "0.5"]
    with scripted(lambda body: spoken(body, gap_s=0.02)) as server:
        limits = ["--max-concurrency", "3", "--num-prompts", "400"]
        assert bench(server.url, *closed, *limits, "--save-result", str(result)) == 0
        assert bench(server.url, *closed) == 2, "thousands at once, and no end to them"
    assert "--max-concurrency" in capsys.readouterr().err
    found = saved(result)["summary"]
    assert 3 <= found["by_outcome"]["ok"] == sum(found["by_outcome"].values()) < 200


def test_chat_is_asked_in_words_counted_by_the_server(tmp_path: Path) -> None:
    """A template of 7 tokens around it: the words leave room for them."""
    result = tmp_path / "a.json"

    def script(body: dict[str, Any]) -> list[Step]:
        words = len(body["messages"][0]["content"].split())
        counted = {"prompt_tokens": words + 7, "completion_tokens": 1}
        said = {"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}}]}
        return [
            (
                0.0,
                EVENTS
                + event(said)
                + event({"choices": [], "usage": counted})
                + event(b"[DONE]")
                + b"0\r\n\r\n",
            )
        ]

    with scripted(script) as server:
        argv = ["--endpoint", "/v1/chat/completions", "--num-prompts", "5", "--request-rate", "inf"]
        assert bench(server.url, *argv, "--save-result", str(result)) == 0
    assert [row["prompt_tokens"] for row in saved(result)["requests"]] == [[12, 12]] * 5


def test_a_server_that_takes_no_ids_gets_words() -> None:
    def script(body: dict[str, Any]) -> list[Step]:
        return spoken(body) if isinstance(body["prompt"], str) else [(0.0, status(422, b"text, please"))]

    with scripted(script) as server:
        assert bench(server.url, "--num-prompts", "3", "--request-rate", "inf") == 0
        assert bench(server.url, "--num-prompts", "3", "--prompt-as", "ids") == 1
    assert [len(body["prompt"].split()) for body in server.bodies if body["max_tokens"] == 4] == [12] * 4


def test_refusals_and_aborts_are_counted_apart(tmp_path: Path) -> None:
    result = tmp_path / "a.json"

    def script(body: dict[str, Any]) -> list[Step]:
        turn = len(server.bodies)
        return [(0.0, status(429, b"no room"))] if turn > 2 and turn % 3 == 0 else spoken(body, gap_s=0.005)

    with scripted(script) as server:
        argv = [
            "--request-rate",
            "inf",
            "--max-concurrency",
            "1",
            "--num-prompts",
            "30",
            "--abort-fraction",
            "0.4",
        ]
        assert bench(server.url, *argv, "--goodput", "ttft:9000", "--save-result", str(result)) == 0
    found = saved(result)["summary"]
    assert found["faults"] == {"http_429": 10}
    assert found["by_outcome"]["rejected"] == 10
    assert 0 < found["by_outcome"]["left"] < 20
    assert found["by_outcome"]["ok"] + found["by_outcome"]["left"] == 20
    assert found["goodput"]["judged"] == 30 - found["by_outcome"]["left"]


def test_a_server_that_dies_leaves_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(body: dict[str, Any]) -> list[Step]:
        return spoken(body) if len(server.bodies) < 8 else [(0.0, b"")]

    with scripted(script) as server:
        assert (
            bench(server.url, "--request-rate", "inf", "--max-concurrency", "2", "--num-prompts", "20") == 0
        )
    said = capsys.readouterr().out
    assert "connection_lost" in said
    ok = len([body for body in server.bodies[:7] if body["max_tokens"] == 4]) - 1  # the warm-up
    assert said.splitlines()[-1] == f"of 20 requests {20 - ok} failed and 0 were refused"
    assert bench(server.url, "--num-prompts", "2") == 1
    assert "refused" in capsys.readouterr().err


def test_a_service_that_restarts_in_mid_run_has_no_figures_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "a.json"
    counted = b"# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total %d\n"

    def script(body: dict[str, Any]) -> list[Step]:
        server.metrics = counted % (9 if len(server.bodies) < 4 else 2)
        return spoken(body)

    argv = ["--request-rate", "100", "--num-prompts", "6", "--save-result", str(result)]
    with scripted(script) as server:
        assert bench(server.url, *argv) == 0
        assert "restarted" in capsys.readouterr().out
        assert saved(result)["server"] == {
            "counters": {}, "histograms_ms": {}, "timelines_ms": {}, "restarted": True,
        }  # fmt: skip
        assert bench(server.url, *argv) == 0
    assert "restarted" not in capsys.readouterr().out
    assert saved(result)["server"]["counters"] == {"preemptions": 0}


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace, result = tmp_path / "t.jsonl", tmp_path / "a.json"
    rows = [(0, 700, 3, [1, 2]), (100, 600, 2, [1, 3]), (300, 512, 1, [1]), (400, 40_960, 1, [1])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    with scripted(spoken) as server:
        argv = [
            "--trace",
            str(trace),
            "--trace-scale",
            "2",
            "--trace-length-scale",
            "0.1",
            "--save-result",
            str(result),
        ]
        assert bench(server.url, *argv) == 0
    found = saved(result)
    assert [row["due_ms"] for row in found["requests"]] == [0, 50, 150]
    first, second, third = (body["prompt"] for body in server.bodies[-3:])
    assert (len(first), len(second), len(third)) == (70, 60, 51)
    assert first[:51] == second[:51] == third and first[51:60] != second[51:]
    assert "1 rows left out" in found["lengths"], "the model has 4096 tokens"
    assert "blocks of 51 tokens" in found["cache_state"]


def test_a_sweep_and_a_search_are_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, picture = tmp_path / "s.json", tmp_path / "s.png"
    with scripted(lambda body: spoken(body, first_s=0.01)) as server:
        argv = ["--num-prompts", "10", "--goodput", "ttft:9000"]
        both = ["--save-result", str(sweep), "--plot", str(picture)]
        assert bench(server.url, *argv, "--sweep-rate", "100,200", *both) == 0
        prompts = [tuple(body["prompt"]) for body in server.bodies]
        assert len(set(prompts)) == len(prompts), "no run finds another's prompts in the cache"
        capsys.readouterr()
        hopeless = [
            "--num-prompts",
            "5",
            "--goodput",
            "ttft:0.001",
            "--find-rate",
            "0.9",
            "--request-rate",
            "4000",
        ]
        assert bench(server.url, *hopeless) == 0
    assert [point["rate"] for point in saved(sweep)["points"]] == [100, 200]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "no rate down to" in capsys.readouterr().out
    assert command.main(["--compare", str(sweep), str(sweep)]) == 2, "names are the same"


def test_a_search_among_too_few_requests_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "f.json"
    argv = ["--num-prompts", "6", "--goodput", "ttft:9000", "--find-rate", "0.9", "--request-rate", "4"]
    with scripted(lambda body: spoken(body, first_s=0.4)) as server:
        assert bench(server.url, *argv, "--seed", "1", "--save-result", str(result)) == 0
    found = saved(result)
    assert len(found["points"]) <= 5
    assert found["rate"]["too_few"] == found["points"][-1]["rate"]
    assert "Raise --num-prompts" in capsys.readouterr().out


def test_what_the_model_cannot_hold_is_said_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """4096 tokens; the answer has 4 unless said."""
    with scripted(spoken) as server:
        for argv in (["--input-len", "9:4093"], ["--prefix-len", "4081"], ["--output-len", "4085"]):
            assert bench(server.url, *argv) == 2
            said = capsys.readouterr().err
            assert argv[0] in said and "4097 tokens" in said and "4096 (its max_model_len)" in said
        assert server.bodies == []
        assert bench(server.url, "--output-len", "4084", "--num-prompts", "1", "--num-warmups", "0") == 0


def test_two_results_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "slow.json", tmp_path / "fast.json"]
    for file, first_s in zip(files, (0.2, 0.02), strict=True):
        with scripted(partial(spoken, first_s=first_s)) as server:
            assert (
                bench(server.url, "--num-prompts", "4", "--request-rate", "inf", "--save-result", str(file))
                == 0
            )
    capsys.readouterr()
    assert command.main(["--compare", *map(str, files)]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("TTFT p50"))
    assert float(row.split()[-1]) < 0.6
    assert "seed" in said and "fast/slow" in said


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--input-len", "9:3"], "--input-len"),
        (["--goodput", "ttft"], "--goodput"),
        (["--find-rate", "0.9"], "--goodput"),
        (["--abort-fraction", "2"], "--abort-fraction"),
        (["--endpoint", "/v1/embeddings"], "--endpoint"),
        (["--base-url", "localhost:8000"], "--base-url"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--trace", "/nowhere.csv"], "--trace"),
        (["--compare", "one.json"], "--compare"),
        (["--compare", "/a.json", "/b.json"], "--compare /a.json"),
        (["--save-result", "/nowhere/a.json"], "--save-result"),
        (["--sweep-rate", "1,x"], "--sweep-rate"),
        (["--num-promts", "3"], "did you mean --num-prompts"),
    ],
)
def test_a_bad_flag_is_named(argv: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(argv) == 2
    said = capsys.readouterr().err
    assert flag in said and len(said.strip().splitlines()) == 1


def test_a_client_that_was_kept_from_the_processor_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "a.json"
    write = BodyShape.body

    def slow_to_write(shape: BodyShape, planned: Planned, prompts: PromptMaker) -> bytes:
        time.sleep(0.2 if planned.index >= 0 else 0.0)  # stands for a scheduler that gives the turn to others
        return write(shape, planned, prompts)

    monkeypatch.setattr(BodyShape, "body", slow_to_write)
    with scripted(spoken) as server:
        assert (
            bench(server.url, "--request-rate", "50", "--num-prompts", "5", "--save-result", str(result)) == 0
        )
    assert saved(result)["client"]["stalls_ms"]["max"] > 150
    assert "kept from the processor" in capsys.readouterr().out


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    result = tmp_path / "a.json"
    with scripted(lambda body: spoken(body, first_s=0.01 if len(server.bodies) < 8 else 60.0)) as server:
        argv = ["--base-url", server.url, *FEW, "--num-prompts", "50", "--request-rate", "50"]
        process = subprocess.Popen(
            [sys.executable, "-m", "bench", *argv, "--save-result", str(result)],
            cwd=project_root(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        until = time.monotonic() + 30
        while len(server.bodies) < 12 and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        said, complained = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "interrupted" in said and "TTFT" in said
    assert "Ctrl-C" in complained
    assert saved(result)["client"]["interrupted"] is True
