"""Shows the log of a run: a page with its curves and what bound it, and the same live in a terminal."""
