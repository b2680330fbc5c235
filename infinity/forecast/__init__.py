"""What an engine would do with a model, told before there is one: its units, its placement, its plan.

Knows shapes and configs; must not hold data, and has no arithmetic of its own: the engine is built from the same draft.
"""
