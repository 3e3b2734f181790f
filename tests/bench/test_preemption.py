"""A KV pool of half of what the load wants, in virtual time: the limits that `python -m bench.preemption` holds."""

from __future__ import annotations

import pytest

from bench.preemption import faults_of, main, plans, serve_virtual, three_runs, virtual_asks


@pytest.mark.parametrize("seed", range(4))
def test_half_the_pool_costs_little(seed: int) -> None:
    asks = virtual_asks(plans(48, seed, 96))
    runs = three_runs(asks, asks, 16, serve_virtual)
    assert runs["wanted"].preemptions == runs["just fits"].preemptions == 0
    assert runs["just fits"].max_num_seqs < 16
    assert faults_of(runs) == []


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--virtual"]) == 0
    said = capsys.readouterr()
    assert "half" in said.out and said.err == ""
