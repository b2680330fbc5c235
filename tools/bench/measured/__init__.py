"""What is measured, each in a process of its own: `ours`, `in_memory`, `deepspeed_peer`, on `models`, told by `child`.

Runs in the environments of others, too, where this package is not: imports only itself, and what each program needs.
"""
