"""Stores weights and optimizer states in RAM or on NVMe, and moves them to where they are used and back.

`infinity.plan.volumes` chooses the tier of each.
"""
