"""Page faults: which unit is in memory, what comes next, and the hooks by which modules and parameters ask.

Knows units and when they are used; must not know gradients, updates or the optimizer.
"""
