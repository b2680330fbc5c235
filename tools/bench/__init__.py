"""What `bench_step.py` and `bench_scale.py` are made of: measured processes, their control groups, and tables.

Where it is measured: `machine`, `cgroup`, `drive`. How: `participant` (the parent's side of a measured process), `case` (who
takes turns), `summary` (tables). Knows the engine by its public names only, and from another process.
"""
