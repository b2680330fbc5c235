"""Units: the parameters that are fetched and released together, and the classes of a parameter while an engine holds
it.

Knows modules and parameters; must not know where weights are stored, or when a unit is needed.
"""
