"""What drives do under the requests that the engine makes. Knows the swapper as its users do."""
