"""Units: the parameters that are fetched and released together, and what a parameter is while an engine holds it.

Knows modules and parameters; must not know where weights rest, or when a unit is needed. All packages from `infinity.tiers` up
import it.
"""
