"""Small things of DeepSpeed's that its scripts import: optimizers by its names, timers, messages.

Knows torch; must not know engines. Where they are imported from: ``infinity.deepspeed_modules``.
"""
