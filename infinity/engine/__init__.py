"""The engine: how its parts are put together, what a training loop calls, and how it ends."""
