"""Before a step: what stays in memory, how the budget is divided, what a step will move and how long it will take.

Knows sizes and measured speeds; must not know tensors. Prints the plan; the engine follows its placement.
"""
