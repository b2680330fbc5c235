"""The command line: ``infinity COMMAND``, or ``python -m infinity COMMAND``.

Knows what is public; must not hold what a program would want to call.
"""
