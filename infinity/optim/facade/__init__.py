"""The optimizer that users hold: a torch optimizer whose state lies elsewhere and is read when somebody looks.

Knows `infinity.optim`; must not know where states rest, but for the backend that it is given.
"""
