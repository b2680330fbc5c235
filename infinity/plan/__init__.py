"""(model, config, machine) -> Plan: what is stored where, how the budgets are divided, what a step will move, and its time.

An engine and `infinity plan` begin with `inputs`, so both say the same. Pure: knows shapes, sizes and speeds, and imports nothing
that moves bytes or measures; `infinity.machine` does.
"""
