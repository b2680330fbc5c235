"""Curves of a run, written where others show them: TensorBoard, Weights & Biases, files of comma-separated values.

Knows names, values and samples; must not know engines. Names and axes are DeepSpeed's.
"""

from infinity.monitors.monitors import Event, Monitor, Monitors

__all__ = ["Event", "Monitor", "Monitors"]
