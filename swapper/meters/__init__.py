"""Who hears of each transfer, and for how long anything was at work."""
