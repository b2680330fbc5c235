"""The vertical schedule: all micro-batches of a step go through a unit before it is let go.

    forward     glue    unit 1  glue    unit 2   ...  glue + loss
    batch 0     0 ───┐  4 ───┐  8 ───┐  ...           loss, and its gradient at once
    batch 1     1    │  5    │  9    │                ...
    batch 2     2    │  6    │ 10    │
    batch 3     3    └─ 7    └─ ..   └─ ..
    backward: the same table from right to left, each unit computed once more per micro-batch

`VerticalSchedule` runs one step like that. Nothing of it is known to the rest of the package but its results.

Knows all rooms below it; nothing of it is known to any room but `infinity.engine`.
"""
