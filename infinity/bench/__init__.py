"""The training step, held against what bounds it: its time, its bytes, its memory, and its peers.

`command` is `infinity bench`; `program` has the order of a run. Where it is measured: `machine`, `cgroup`, `drive`. How:
`participant` (the parent's side of a measured process), `case` (who takes turns), `summary` (tables); `updates` are measured
alone. Knows the engine by its public names only, and from another process. Nothing in the package may import it.
"""
