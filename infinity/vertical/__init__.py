"""The vertical schedule: all micro-batches of a step go through a unit before it is released.

    forward     graph   unit 1  graph   unit 2   ...  graph + loss
    batch 0     0 ───┐  4 ───┐  8 ───┐  ...           loss, and its gradient at once
    batch 1     1    │  5    │  9    │                ...
    batch 2     2    │  6    │ 10    │
    batch 3     3    └─ 7    └─ ..   └─ ..
    backward: the same table from right to left, each unit computed once more per micro-batch

`VerticalSchedule` runs such steps. Read the files in this order: `schedule`, `step`, `microbatch` (with its
thread), `call` (one block, computed twice), and `inter_block_graph`.
"""
