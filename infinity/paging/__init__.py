"""Which unit is in memory and what comes next, packed saved tensors, and which parameter lies where."""
