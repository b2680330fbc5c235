"""Stores weights and optimizer states in RAM or on NVMe, and moves them to where they are used and back.

`infinity.plan.volumes` chooses the tier of each. Knows units, chunks and swappers; must not know when a unit is needed
(`infinity.paging`) or how an update is computed (`infinity.updates`).
"""
