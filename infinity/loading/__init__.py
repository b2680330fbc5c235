"""How a model comes to be without being in memory: built by `Init`, on drives from the first parameter on.

Knows modules, parameters and mapped memory; must not know units or engines.
"""
