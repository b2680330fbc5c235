"""What `bench_step.py` and `bench_scale.py` are made of: measured processes, their control groups, and tables.

`options`: what is asked for, and the machine. `cgroup`: limits. `participant`: the parent's side of a measured process. `case`:
who takes turns, and the drive alone. `summary`: tables. Knows the engine by its public names only, and from another process.
"""
