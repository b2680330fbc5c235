"""The optimizer that users hold: a torch optimizer whose state lies elsewhere and is read when somebody looks."""
