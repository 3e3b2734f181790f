"""`bench/against_peer.sh` without its servers: what runs in what order, which rates, what is best, what is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import given, strategies as st

from bench.against_peer import figures, plan, search
from bench.against_peer.__main__ import main
from bench.against_peer.asked import PROMISED, Asked
from bench.against_peer.clients import LoadFault, parse_witness
from bench.against_peer.figures import Cell, cell_of, compare
from bench.against_peer.gguf_f16 import convert
from bench.against_peer.plan import QUICK, Session, Side, Sizes, sessions_of
from bench.against_peer.plots import draw
from bench.against_peer.runs import Folder, OtherSettings, Places, Runner
from bench.against_peer.search import Grid, Point, crossing, next_rate, pooled
from bench.against_peer.servers import ServerFault, Target, free_port, running
from bench.load.goodput import parse_targets
from bench.load.records import Record
from bench.load.result_file import as_json
from bench.load.summary import summarize

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "against_peer.sh"

# ---------------------------------------------------------------- the plan


def test_every_alternation_has_every_server_and_ours_first() -> None:
    for alternation in (1, 2, 3):
        sessions = sessions_of(alternation, plan.PARTS, plan.VLLM_BUDGETS, ("256", "512"))
        assert [(s.side, s.setting) for s in sessions] == [
            ("kvferry", "pools"),
            *(("vllm", budget) for budget in ("64", "128", "256", "default")),
            ("openvino", "256"),
            ("openvino", "512"),
            *(("kvferry", name) for name in ("collocated", "collocated-128", "dynamic", "static")),
        ]
        assert len({session.name for session in sessions}) == len(sessions)


def test_a_part_brings_what_it_is_compared_with() -> None:
    (ours, theirs) = sessions_of(1, ("openvino",), ("64",), ("256",))
    assert ours.parts == ("saturated",) and theirs.parts == ("openvino",)
    assert [s.parts for s in sessions_of(1, ("baselines",), ("64",), ("256",))] == [("goodput",)] * 5
    assert sessions_of(1, ("curve",), ("default",), ())[1].flags == ()
    assert sessions_of(1, ("curve",), ("64",), ())[1].flags == ("--max-num-batched-tokens", "64")


def test_what_is_quick_takes_less() -> None:
    def minutes(sizes: Sizes) -> float:
        return plan.estimate_all_s(("saturated", "curve"), sizes, (2.5, 3.5), plan.VLLM_BUDGETS, ()) / 60

    assert 10 < minutes(QUICK) < 30 < minutes(Sizes()) < 90


# ---------------------------------------------------------------- the search


def measure_all(capacity: float, earlier: dict[float, Point], requests: int = 1000) -> dict[float, Point]:
    """A server of which all requests are in time up to `capacity`, and fewer and fewer beyond it."""
    points: dict[float, Point] = {}
    for _ in range(30):
        rate = next_rate(points, earlier, 2.5, Grid())
        if rate is None:
            return points
        assert rate not in points, "asked twice"
        points[rate] = Point(round(requests * min(1.0, max(0.0, 1 - 0.5 * (rate / capacity - 1)))), requests)
    raise AssertionError("does not come to an end")


@given(st.floats(0.5, 25.0))
def test_the_search_ends_near_the_rate_of_90_percent(capacity: float) -> None:
    points = measure_all(capacity, {})
    assert crossing(points) == pytest.approx(1.2 * capacity, rel=0.08)
    assert len(points) <= 9


@given(st.floats(0.5, 25.0), st.floats(0.7, 1.4))
def test_a_later_alternation_meets_the_points_of_the_first_and_finds_its_own_rate(
    capacity: float, drift: float
) -> None:
    first = measure_all(capacity, {})
    second = measure_all(capacity * drift, first)
    assert crossing(second) == pytest.approx(1.2 * capacity * drift, rel=0.15)
    both = pooled([first, second])
    shared = [rate for rate in first if rate in second]
    assert len(shared) >= 2 and all(both[rate].judged == 2000 for rate in shared)


def test_a_server_that_never_or_always_attains() -> None:
    never, always = measure_all(0.001, {}), measure_all(1e6, {})
    assert min(never) == Grid().lowest_per_s and crossing(never) == 0.0
    assert crossing(always) == max(always) <= Grid().highest_per_s


def test_the_crossing_lies_on_the_line_between_its_neighbours() -> None:
    assert crossing({2.0: Point(100, 100), 4.0: Point(80, 100)}) == pytest.approx(3.0)
    assert crossing({1.0: Point(95, 100), 2.0: Point(85, 100), 3.0: Point(99, 100)}) == pytest.approx(1.5), (
        "the first failure counts"
    )


# ---------------------------------------------------------------- figures


def cell(side: Side, setting: str, alternation: int, load: str, rate: float = 0.0, **more: Any) -> Cell:
    return Cell(side, setting, alternation, load, rate, ok=10, sent=10, **more)


def test_ratios_are_of_medians_and_the_peer_has_its_best_for_each_figure() -> None:
    cells = [cell("kvferry", "pools", n, "saturated", rate) for n, rate in enumerate((6.0, 9.0, 6.6), 1)]
    cells += [cell("vllm", "64", n, "saturated", 4.0) for n in (1, 2, 3)]
    cells += [cell("vllm", "128", n, "saturated", rate) for n, rate in enumerate((5.5, 5.0, 4.9), 1)]
    for n in (1, 2, 3):
        cells.append(cell("kvferry", "pools", n, "curve@2.5", itl_p99_ms=40.0, ttft_p50_ms=150.0))
        cells.append(cell("vllm", "64", n, "curve@2.5", itl_p99_ms=50.0, ttft_p50_ms=240.0))
        cells.append(cell("vllm", "128", n, "curve@2.5", itl_p99_ms=64.0, ttft_p50_ms=120.0))
    throughput, itl, ttft = figures.rows(cells, (2.5, 3.5))
    assert (throughput.ours, throughput.theirs, throughput.their_setting) == (6.6, 5.0, "128")
    assert throughput.ratio == pytest.approx(1.32) and throughput.reached
    assert throughput.spread is not None and list(throughput.spread) == pytest.approx([6.0 / 5.5, 9.0 / 5.0])
    assert (itl.their_setting, itl.reached) == ("64", True) and itl.ratio == pytest.approx(0.8)
    assert (ttft.their_setting, ttft.reached) == ("128", False) and ttft.ratio == pytest.approx(1.25)
    assert figures.winners(cells, "vllm", (2.5, 3.5)) == {"64", "128"}
    assert "≥ 1.3 ✓" in figures.table([throughput]) and "≤ 1.1 ✗" in figures.table([ttft])


def goodput_cells(side: Side, setting: str, points: dict[float, tuple[int, ...]], judged: int) -> list[Cell]:
    """Rate → attained of each alternation."""
    return [
        cell(side, setting, n, f"goodput@{rate:g}", attained=attained, judged=judged)
        for rate, each in points.items()
        for n, attained in enumerate(each, 1)
    ]


def test_goodput_is_read_from_pooled_points_and_single_alternations_are_its_spread() -> None:
    """The median of the single crossings, 3.8, 2 and 3.8, would be 3.8."""
    cells = goodput_cells("kvferry", "pools", {2.0: (100, 90, 100), 4.0: (89, 40, 89)}, judged=100)
    cells += goodput_cells("vllm", "128", {1.0: (100,) * 3, 2.0: (80,) * 3}, judged=100)
    cells += goodput_cells("vllm", "64", {1.0: (95,) * 3, 2.0: (0,) * 3}, judged=100)
    cells += goodput_cells("kvferry", "static", {1.0: (100,) * 3, 2.0: (80,) * 3}, judged=100)
    row, static = figures.rows(cells, (2.5,))
    assert [row.figure.strip(), static.figure.strip()] == ["goodput, req/s at 90 %", "our own static"]
    assert row.ours == pytest.approx(2 + 2 * (290 / 300 - 0.9) / (290 / 300 - 218 / 300))
    assert row.theirs == pytest.approx(1.5) and (row.their_setting, row.requests) == ("128", 300)
    assert row.reached is True and row.ratio == pytest.approx(row.ours / 1.5) and static.reached is None
    assert row.spread is not None and row.spread[0] == pytest.approx(2 / 1.5) and row.spread[1] > 2.4
    assert "≥ 1.5 ✓    300" in figures.table([row])
    assert figures.pooled_goodput(cells)[("vllm", "128")] == {1.0: Point(300, 300), 2.0: Point(240, 300)}
    assert "kvferry static: 1/s 100.0% of 300, 2/s 80.0% of 300" in figures.point_lines(cells)


def test_a_goodput_of_too_few_requests_says_so_and_reaches_nothing() -> None:
    cells = goodput_cells("kvferry", "pools", {2.0: (100,) * 3, 4.0: (80,) * 3}, judged=100)
    cells += goodput_cells("vllm", "128", {1.0: (100,) * 2, 2.0: (80,) * 2}, judged=100)
    (row,) = figures.rows(cells, (2.5,))
    assert row.ratio == pytest.approx(2.0) and (row.reached, row.requests) == (None, 200)
    assert "200, too few (of 300)" in figures.table([row])
    (alone,) = figures.rows([one for one in cells if one.side == "kvferry"], (2.5,))
    assert alone.ours == pytest.approx(3.0) and (alone.theirs, alone.requests) == (None, 300)


def test_a_thin_point_does_not_count_where_thick_ones_enclose_the_rate() -> None:
    thick, thin = {2.0: Point(300, 300), 4.0: Point(240, 300)}, {3.0: Point(70, 100)}
    assert search.thick_ones(thick | thin) == thick
    low = {2.0: Point(300, 300)} | thin
    assert search.thick_ones(low) == low and search.requests_behind(low) == 100, "nothing thick fails"
    assert search.requests_behind({}) == 0


def test_nothing_measured_says_nothing() -> None:
    assert figures.rows([], (2.5,)) == []
    assert compare("x", {}, {"a": {1: 2.0}}, "more", 1.0) is None
    alone = compare("x", {1: 3.0}, {}, "more", 1.0)
    assert alone is not None and (alone.ours, alone.ratio, alone.reached) == (3.0, None, None)


def saved_result(gap_s: float) -> dict[str, Any]:
    """As `python -m bench --save-result` writes it: ten requests of four tokens, first text after 0.2 s."""
    records = [
        Record(n, "ok", 0.0, 0.0, 1.0, 256, 4, tuple(0.2 + gap_s * k for k in range(4))) for n in range(10)
    ]
    summary = summarize(records, parse_targets(("ttft:500", "itl:75")), 1)
    result = {"summary": summary, "requests": [], "client": {"cpu_s": 0.1, "wall_s": 2.0}}
    found: dict[str, Any] = json.loads(as_json(result))
    return found


def test_a_cell_is_read_from_what_our_client_saves() -> None:
    session = Session("vllm", "128", 2, ("saturated",))
    found = cell_of(session, "saturated", saved_result(0.05))
    assert (found.side, found.setting, found.alternation, found.ok, found.sent) == ("vllm", "128", 2, 10, 10)
    assert found.requests_per_s == pytest.approx(10.0)
    assert found.ttft_p50_ms == pytest.approx(200.0)
    assert found.itl_p99_ms == pytest.approx(50.0) and found.first_gap_p99_ms == pytest.approx(50.0)
    assert (found.attained, found.judged) == (10, 10) and found.client_cpu_share == pytest.approx(0.05)
    assert cell_of(session, "saturated", saved_result(0.09)).attained == 0


def test_a_run_that_cannot_be_is_doubted() -> None:
    session = Session("vllm", "128", 1, ("curve",))
    assert figures.doubts(cell_of(session, "curve@2.5", saved_result(0.05))) == ""
    assert "all at once" in figures.doubts(cell_of(session, "curve@2.5", saved_result(0.0)))
    assert "1 of 10 requests failed" in figures.doubts(replace(cell("vllm", "128", 1, "witness"), ok=9))
    assert figures.doubts(cell("vllm", "128", 1, "witness")) == "", "which has no latencies"


def test_what_the_peers_own_client_says() -> None:
    said = "Failed requests=2  ; Request throughput (req/s)=4.48  ; Median TTFT (ms)=830.1; "
    assert parse_witness(said) == (4.48, 2)
    with pytest.raises(LoadFault, match="no such model"):
        parse_witness("no such model")


def test_pictures_of_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [cell("vllm", name, 1, "curve@2.5", ttft_p50_ms=9.0, itl_p99_ms=9.0) for name in ("64", "other")]
    cells.append(cell("kvferry", "pools", 1, "curve@2.5", ttft_p50_ms=5.0, itl_p99_ms=5.0))
    assert [path.name for path in draw(cells, Asked(), tmp_path)] == ["trade_off.png"]
    cells.append(cell("kvferry", "pools", 1, "goodput@4", attained=9, judged=10))
    cells.append(cell("kvferry", "pools", 1, "goodput@2", attained=120, judged=120))
    cells.append(cell("kvferry", "static", 1, "goodput@2", attained=0, judged=120))
    drawn = draw(cells, Asked(), tmp_path)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn) and len(drawn) == 2


# ---------------------------------------------------------------- what is kept


def test_a_broken_run_goes_on_and_other_settings_are_refused(tmp_path: Path) -> None:
    session = Session("kvferry", "pools", 1, ("curve",))
    folder = Folder.open(tmp_path, {"sizes": 1})
    kept = cell("kvferry", "pools", 1, "curve@2.5", 2.4)
    folder.keep(session, kept)
    (tmp_path / "cells" / "half.partial").write_text("{")
    again = Folder.open(tmp_path, {"sizes": 1})
    assert again.cells() == [kept]
    assert again.has(session, "curve@2.5") and not again.has(session, "curve@3.5")
    seeds = {again.seed_of(n, load) for n in (1, 2) for load in ("curve@2.5", "saturated")}
    assert len(seeds) == 4, "no server sees one twice"
    assert seeds == {folder.seed_of(n, load) for n in (1, 2) for load in ("curve@2.5", "saturated")}
    with pytest.raises(OtherSettings, match="another --out"):
        Folder.open(tmp_path, {"sizes": 2})


def loads_of(session: Session, folder: Folder, sizes: Sizes) -> list[str]:
    """What it would measure next, one after the other; a goodput point attains while the rate is below 4."""
    places = Places(ROOT, ROOT, None, "peer", None, None, Path("/model"), ())
    runner = Runner(folder, places, sizes, Asked(), print)
    loads: list[str] = []
    while (load := runner._next(session)) is not None:
        loads.append(load)
        good = not load.startswith("goodput") or figures.rate_of(load) < 4.0
        folder.keep(session, cell("vllm", "64", session.alternation, load, attained=99 * good, judged=100))
    return loads


def test_a_session_measures_what_is_missing_and_searches_on(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path, {})
    first = Session("vllm", "64", 1, ("saturated", "curve", "goodput"))
    folder.keep(first, cell("vllm", "64", 1, "curve@2.5"))
    searched = ["goodput@2.5", "goodput@5", "goodput@3.75", "goodput@4.375"]
    assert loads_of(first, folder, QUICK) == ["saturated", "witness", "curve@3.5", *searched]
    second = Session("vllm", "64", 2, ("saturated", "goodput"))
    again = ["goodput@2.5", "goodput@3.75", "goodput@4.375", "goodput@5"]
    assert loads_of(second, folder, QUICK) == ["saturated", *again], "the same points; the witness was asked"
    assert loads_of(first, folder, QUICK) == []
    third = Session("vllm", "64", 3, ("saturated",))
    assert loads_of(third, folder, Sizes()) == ["saturated", "witness"]


# ---------------------------------------------------------------- servers


def test_kvferry_is_told_the_targets_that_it_is_judged_by() -> None:
    """Where promises are judged. A saturated run was refused by its forecast, and counted a third of its requests."""
    for asked in (Asked(), Asked(time_scale=5.0)):
        tiers = tomllib.loads(asked.tiers)["tiers"]
        tier = tiers.pop(json.loads(PROMISED)["service_tier"])
        assert [f"{name}:{tier[f'{name}_ms']:g}" for name in ("ttft", "itl")] == list(asked.targets)
        assert tiers == {"default": {}}, "whoever names none is promised nothing"


def test_a_slower_machine_is_asked_for_the_same_in_its_own_time() -> None:
    usual, slow = Asked(), Asked(time_scale=5.0)
    assert slow.curve_rates == (0.5, 0.7) and slow.targets == ("ttft:2500", "itl:375")
    points = {rate: Point(95 if rate < 3 else 80, 100) for rate in (2.5, 5.0)}
    slowly = {rate / 5: point for rate, point in points.items()}
    expected = next_rate(points, {}, usual.first_goodput_rate, usual.grid)
    assert expected is not None
    assert next_rate(slowly, {}, slow.first_goodput_rate, slow.grid) == pytest.approx(expected / 5)


SERVER = """
import http.server, subprocess, sys
subprocess.Popen(["sleep", "600"])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def group(leader: int) -> list[str]:
    return [
        stat.parent.name
        for stat in Path("/proc").glob("[0-9]*/stat")
        if (fields := _fields(stat)) and fields[2] == str(leader) and fields[0] != "Z"
    ]


def _fields(stat: Path) -> list[str]:
    """From the state on: state, parent, group."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def test_a_server_ends_with_all_that_it_started(tmp_path: Path) -> None:
    port = free_port()
    target = Target(f"http://127.0.0.1:{port}", "m")
    with running([sys.executable, "-c", SERVER, str(port)], target, tmp_path / "log"):
        leaders = {_fields(Path(f"/proc/{pid}/stat"))[2] for pid in _children()}
        members = [pid for leader in leaders for pid in group(int(leader))]
        assert len(members) == 2, "the server and what it started"
    deadline = time.monotonic() + 5.0
    while any(group(int(leader)) for leader in leaders) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(group(int(leader)) for leader in leaders)


def _children() -> list[str]:
    """Processes of other groups that this one started."""
    mine = str(os.getpid())
    found = {stat.parent.name: _fields(stat) for stat in Path("/proc").glob("[0-9]*/stat")}
    return [pid for pid, fields in found.items() if fields and fields[1] == mine and fields[2] == pid]


def test_a_server_that_does_not_start_is_told_of_in_its_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(ServerFault, match=r"ended with 1.*no such model"),
        running(command, Target(f"http://127.0.0.1:{free_port()}", "m"), tmp_path / "log"),
    ):
        pass


# ---------------------------------------------------------------- the peer's file, and the script


def test_openvino_gets_the_weights_as_16_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    weight = rng.standard_normal((8, 64), dtype=np.float32)
    writer = GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    packed = quantize(weight, GGMLQuantizationType.Q4_1)
    writer.add_tensor("w", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm", weight[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(tmp_path / "q.gguf", tmp_path / "f.gguf")
    made = GGUFReader(tmp_path / "f.gguf")
    assert made.fields["llama.block_count"].contents() == 1
    assert made.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    by_name = {tensor.name: tensor for tensor in made.tensors}
    assert by_name["w"].tensor_type == GGMLQuantizationType.F16
    wanted = dequantize(packed, GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(by_name["w"].data.reshape(wanted.shape), wanted, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(by_name["norm"].data, weight[0])


def script(*argv: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "MODEL": "/model"}
    return subprocess.run([str(SCRIPT), *argv], env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="the script runs in .venv, as make leaves it")
def test_the_script_finds_its_way_and_says_how_long_it_takes(tmp_path: Path) -> None:
    said = script("--only", "baselines", "--estimate", "--quick", "--out", str(tmp_path / "out"))
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("baselines: about ") and not (tmp_path / "out").exists()
    said = script(str(tmp_path), "--only", "curve", "--estimate")
    assert said.returncode == 2 and "no serve_vllm_cpu.sh" in said.stderr
    said = script("http://127.0.0.1:1", "--only=curve", "--estimate")
    assert said.returncode == 0, said.stderr


def test_bad_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--model", "/m", "--out", "/o", "--only", "speed"])
    assert left.value.code == 2
    assert "speed is none of saturated, curve" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=10)
