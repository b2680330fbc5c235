"""The optimizer that users hold: a torch optimizer whose state is stored elsewhere, and read when somebody looks."""
