"""What is known of torch beyond its documented interface: its dispatcher, modes, operations, and tensors without values.

Knows torch only; must not know parameters, units or engines. Anybody may import it.
"""
