"""What the modules of DeepSpeed's names contain: optimizers by its names, timers, messages.

Which of these is in which module says ``infinity.deepspeed.modules``.
"""
