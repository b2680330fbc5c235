"""The command line: ``infinity COMMAND``, or ``python -m infinity COMMAND``."""
