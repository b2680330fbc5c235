"""Backends around another one: checksums, faults to test with, slower drives."""
