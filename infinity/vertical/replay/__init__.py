"""What makes a block's forward repeatable in another thread at another time: its arguments, effects, buffers and modes.

Knows modules and torch's per-thread state; must not know units, paging or the schedule.
"""
