"""Observers of transfers, and the time in which any transfer was running."""
