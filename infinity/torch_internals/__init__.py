"""What is known of torch beyond its documented interface: its dispatcher, modes, operations, and file formats.

Knows torch only; must not know units or engines. Any package may import it.
"""
