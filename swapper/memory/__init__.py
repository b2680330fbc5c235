"""Memory that transfers use: aligned regions, pages to lend, buffers of others, and which request has which.

Knows addresses; must not know files.
"""
