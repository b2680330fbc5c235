"""Stores weights and optimizer states in RAM or on NVMe, and moves them to where they are used and back.

Knows units, chunks and swappers; must not know when a unit is needed (`infinity.paging`) or how an update is computed
(`infinity.updates`).
"""
