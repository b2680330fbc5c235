"""What each module of a model computes: operations, parameters and time, as DeepSpeed's profiler prints them.

Knows torch's modules; must not know paging: what it costs is in the times.
"""
