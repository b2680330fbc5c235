"""A GPU that is host memory: nastier than a real one, so that what only a GPU would show is seen without one."""
