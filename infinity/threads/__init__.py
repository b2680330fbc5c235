"""What threads share: whose turn it is, what others run, interrupts, the workers behind torch's operators, and what each
thread carries.

Knows threads; must not know modules, units or memory. Anybody but `infinity.numerics` may import it.
"""
