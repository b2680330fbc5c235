"""Memory that transfers use: aligned regions, staging buffers, users' buffers, and which request uses which."""
