"""Traces in their published formats, on rows of our own."""

from __future__ import annotations

import pytest

from bench.load.traces import BadTrace, Row, read_trace, scaled

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:59.9799600,4808,10
2023-11-16 18:18:01.0319600,31,8
""".splitlines()
MOONCAKE = """{"timestamp": 3000, "input_length": 1000, "output_length": 20, "hash_ids": [0, 7]}
{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 9]}
{"timestamp": 6000, "input_length": 500, "output_length": 6, "hash_ids": [0]}
{"timestamp": 6000, "input_length": 500, "output_length": 7, "hash_ids": [4]}
""".splitlines()
RANGES = """timestamp_ms,input_length,output_length,hash_id_ranges
0,6758,500,0-3
277,32140,92,0 5-7 9
""".splitlines()


def test_azure_rows_count_from_the_first() -> None:
    trace = read_trace(AZURE)
    assert (trace.format, trace.block_tokens, trace.spread_over_s) == ("Azure 2023", 0, 0.0)
    first, second = trace.rows
    assert first == Row(0.0, 4808, 10)
    assert second.at_s == pytest.approx(1.052, abs=1e-6)
    assert (second.prompt_tokens, second.output_tokens) == (31, 8)


def test_mooncake_rows_of_one_stamp_are_spread_over_the_step_of_its_grid() -> None:
    trace = read_trace(MOONCAKE)
    assert [row.at_s for row in trace.rows] == [0.0, 1.5, 3.0, 4.5]
    assert trace.spread_over_s == 3.0
    assert [row.blocks for row in trace.rows] == [(0, 7), (0, 9), (0,), (4,)]
    assert trace.block_tokens == 512


def test_ranges_of_blocks_are_written_out() -> None:
    trace = read_trace(RANGES)
    assert [row.blocks for row in trace.rows] == [(0, 1, 2, 3), (0, 5, 6, 7, 9)]
    assert [row.at_s for row in trace.rows] == [0.0, 0.277]


def test_scaling_is_of_times_and_of_lengths_with_their_blocks() -> None:
    trace = scaled(read_trace(MOONCAKE), 3.0, 0.1)
    assert [row.at_s for row in trace.rows] == [0.0, 0.5, 1.0, 1.5]
    assert [row.prompt_tokens for row in trace.rows] == [100, 60, 50, 50]
    assert [row.output_tokens for row in trace.rows] == [2, 1, 1, 1]
    assert (trace.block_tokens, trace.spread_over_s) == (51, 1.0)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "neither"),
        (["a,b,c"], "neither"),
        (AZURE[:1], "no request"),
        ([*AZURE, "yesterday,1,2"], "line 4"),
        ([*AZURE, "2023-11-16 18:18:01.0,0,2"], "line 4"),
        ([*MOONCAKE, '{"timestamp": 1}'], "line 5: KeyError"),
        ([*MOONCAKE, "{"], "line 5"),
        ([*RANGES, "1,2,3,x-y"], "line 4"),
    ],
)
def test_a_bad_line_is_named(lines: list[str], words: str) -> None:
    with pytest.raises(BadTrace, match=words):
        read_trace(lines)
