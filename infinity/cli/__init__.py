"""Commands that work on files without a training, and one that starts trainings: ``python -m infinity COMMAND``.

Knows what is public; must not hold what a program would want to call.
"""
