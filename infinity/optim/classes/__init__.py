"""Optimizer classes that torch does not have.

Each knows one rule; must not know pages, pieces or groups of processes.
"""
