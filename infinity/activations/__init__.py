"""Inputs of blocks between their forward and their backward: in RAM as far as the budget goes, on NVMe beyond it.

Knows tensors that autograd saves; must not know the schedule that asks for them.
"""
