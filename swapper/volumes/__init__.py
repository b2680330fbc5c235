"""Files and their drives: scratch space, stripes, free space, durable runs, and atomic publication of files."""
