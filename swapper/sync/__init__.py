"""How threads wake each other, and what is done about code that comes in between. Knows threads only."""
