"""What the drives of a machine do under the engine's requests, beside fio, and the settings that follow from it.

`program` has the order of a run, `session` that of the measurement. Knows the planner's bytes and the config's keys; must
not know an engine. Nothing in the package may import it but a command: it loads what prints and draws.
"""
