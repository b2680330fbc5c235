"""(model, config, machine) -> Plan: what is stored where, how budgets are divided, the bytes that a step moves, and its
time.

Engines and `infinity plan` both begin with `inputs`, so they predict the same. Pure: knows shapes, sizes and speeds. It
must not import anything that moves bytes or measures; `infinity.machine` does.
"""
