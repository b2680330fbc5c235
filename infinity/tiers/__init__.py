"""Where weights and optimizer states rest: RAM, NVMe, and how they come from there and go back.

Knows units, chunks and swappers; must not know when a unit is needed (`infinity.paging`) or how an update is computed
(`infinity.updates`).
"""
