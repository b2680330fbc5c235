"""What the modules of DeepSpeed's names contain: optimizers by its names, timers, messages, estimates, tiled layers.

Which of these is in which module says ``infinity.deepspeed.modules``.
"""
