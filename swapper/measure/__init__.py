"""What drives do under the requests that the engine makes, and what is decided by it. Knows no extents of others."""
