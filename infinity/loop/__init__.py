"""What torch and the user's training loop call: hooks, page faults, backwards, phases, ``parameter.grad``, batches."""
