"""What the log of a run shows: a page with its curves and what bound it, and the same live in a terminal.

Knows logs and the cost model; must not know engines.
"""
