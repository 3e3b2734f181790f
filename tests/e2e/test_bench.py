"""`kvferry bench` against a real service: what the client measures agrees with what the server does."""

from __future__ import annotations

import json
from pathlib import Path

from bench.load import command
from tests.e2e.service import Service

ONE_LOOP_S = 0.25
"""What a loaded machine may put between a byte's writing and its reading."""


def eight_requests(service: Service) -> list[str]:
    """Flags for eight of them, four at once."""
    closed_loop = ["--request-rate", "inf", "--max-concurrency", "4", "--num-prompts", "8"]
    return ["--base-url", service.url, *closed_loop, "--num-warmups", "0"]


def test_client_and_server_agree(undisturbed: Service, tmp_path: Path) -> None:
    service, path = undisturbed, tmp_path / "run.json"
    before = {
        name: total(service, name) for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
    }
    lengths = ["--input-len", "20:60", "--output-len", "12", "--prompt-as", "ids"]
    argv = [*eight_requests(service), *lengths]
    assert command.main([*argv, "--goodput", "ttft:60000", "--save-result", str(path), "--no-progress"]) == 0
    found = json.loads(path.read_text())
    summary, server = found["summary"], found["server"]
    assert summary["by_outcome"]["ok"] == 8
    assert (summary["prompts_as_asked"], summary["outputs_as_asked"]) == (8, 8)
    assert found["service"]["kind"] == "kvferry"
    assert {row["batching"] for row in found["service"]["workers"]} == {"continuous"}
    assert server["timelines_ms"]["queue"]["count"] == 8
    assert server["counters"]["transfer_bytes"] > 0
    # The probe (one token) is in the server's sums too.
    ttft_s = sum(row["ttft_ms"] for row in found["requests"]) / 1e3
    gaps_s = sum(sum(row["gaps_ms"]) for row in found["requests"]) / 1e3
    num_gaps = sum(len(row["gaps_ms"]) for row in found["requests"])
    server_ttft_s = total(service, "time_to_first_token_seconds") - before["time_to_first_token_seconds"]
    server_gaps_s = total(service, "inter_token_latency_seconds") - before["inter_token_latency_seconds"]
    assert abs(ttft_s - server_ttft_s) < 9 * ONE_LOOP_S
    assert abs(gaps_s - server_gaps_s) < 8 * ONE_LOOP_S
    assert num_gaps >= 8 * 6, "most tokens come in chunks of their own"


def test_who_leaves_is_an_abort_at_the_server_and_leaves_nothing_behind(
    undisturbed: Service, tmp_path: Path
) -> None:
    service, path = undisturbed, tmp_path / "run.json"
    before = service.metric("request_success_total", finished_reason="abort")
    lengths = ["--input-len", "20", "--output-len", "60"]
    argv = [*eight_requests(service), *lengths, "--abort-fraction", "1", "--seed", "3"]
    assert command.main([*argv, "--save-result", str(path), "--no-progress"]) == 1, (
        "nobody was answered whole"
    )
    left = json.loads(path.read_text())["summary"]["by_outcome"]["left"]
    service.until_idle()
    aborted = service.metric("request_success_total", finished_reason="abort") - before
    assert left == 8 and 4 <= aborted <= 8, "the last chunks may have been on their way already"


def total(service: Service, name: str) -> float:
    return service.metric(f"{name}_sum")
