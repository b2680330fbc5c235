"""This machine's drives and their speed, memory, processors, GPU and packages.

`here` answers what plans ask, `drive_profile` measures, `storage` and `computing` serve `infinity doctor`.
"""
