"""The compute device and its memory: flat buffers, pools of them, copies. The only package that names streams and
events."""
