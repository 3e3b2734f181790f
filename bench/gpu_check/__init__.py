"""`bench/gpu_check.sh`: what a CPU cannot prove of the GPU path, settled on a GPU in under four minutes.

    places ─▶ attention, small, block_moves, sampling    each kernel against float64 (or the rule, bit for bit)
      │         and timed against `roofs`, which the same run measured
      ├─▶ models: a small and an 8B-shaped model of random weights (`weights`), driven by `driving`
      │     paths      tokens equal in chunks, alone, together, eager, as graphs, with blocks moved between two pools
      │     channels   the same over tcp, shm and ipc: `prefill_end` is the other process
      │     steps      whole steps over their roof, graphs against eager
      └─▶ tune         launch parameters tried, and written where kernels/gpu/tuning.py reads them

What is found is a `Check`, a `Speed`, a `Skipped` or a `Noted` (`findings`); `report` makes table and JSON of them.
`--cpu` runs all of it in Triton's interpreter on tiny shapes: a machine without a GPU can test the script itself.
"""
