"""Main gradients: collected from autograd, summed, spilled, shown, and handed to the update.

Knows units and memory; must not know when an update runs (`infinity.updates`) or which loop the user has
(`infinity.loop`).
"""
