"""What threads share: the engine lock, the workers behind torch's operators, and what each thread carries.

Knows threads; must not know modules, units or memory. Anybody but `infinity.numerics` may import it.
"""
