"""What is known of torch beyond its documented interface: its dispatcher, modes, operations, and file formats.

Any package may import it.
"""
