"""What this machine has for a training: drives and how fast they are, memory, processors, a GPU, packages.

`here` answers what plans ask, `drive_profile` measures, `storage` and `computing` find what `infinity doctor` says.
"""
