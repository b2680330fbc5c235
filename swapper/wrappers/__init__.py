"""Backends around another one: checksums and versions."""
