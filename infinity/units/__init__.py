"""Units: the parameters that are fetched and released together, and the classes of a parameter while an engine holds
it.
"""
