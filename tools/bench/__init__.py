"""Parts of `bench_step.py`.

What is measured: `models`, `ours`, `in_memory`, `deepspeed_peer`. Where: `machine`, `cgroup`, `drive`.
How: `child` (the measured process), `participant` (its parent's side), `case` (who takes turns), `summary` (tables).
"""
