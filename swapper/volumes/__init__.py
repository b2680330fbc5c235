"""Files and the drives under them: scratch space, stripes, free room, and files that appear all at once.

Knows file systems; must not know transfers.
"""
