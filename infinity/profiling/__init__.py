"""What each module of a model computes: operations, parameters and time, as DeepSpeed's profiler prints them.

Knows torch's modules; must not know paging: what it costs is in the times.
"""

from infinity.deepspeed_path import PATH

__path__.append(PATH)  # for an error that explains what DeepSpeed has there
