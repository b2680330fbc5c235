"""From a request to its end: queues, order, retries, deadlines, errors and statistics.

Knows backends by their interface; must not know files.
"""
