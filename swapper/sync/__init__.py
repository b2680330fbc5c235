"""How threads wake each other, Ctrl-C, and what is done about code that comes in between. Knows threads only."""
