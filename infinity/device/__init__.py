"""The compute device and the memory it computes with: flat buffers, pools of them, copies, and how much memory there is.

Knows tensors and streams; must not know parameters or units. The only package that names streams and events.
"""
