"""Memory that transfers use: aligned regions, staging buffers, buffers of others, and which request has which.

Knows addresses; must not know files.
"""
