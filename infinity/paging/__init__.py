"""Which unit is in memory and what comes next, packed saved tensors, and which parameter lies where.

Knows units and when they are used; must not know gradients, updates or the optimizer.
"""
