"""What the benchmarks are made of: measured processes, their control groups, and who takes turns.

`options`: what is asked for, and the machine. `cgroup`: limits. `participant`: the parent's side of a measured process. `case`:
who takes turns, and the drive alone. Knows the engine by its public names only, and from another process.
"""
