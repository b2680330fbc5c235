"""What this machine has for a training: drives, memory, processors, a GPU, packages. Looked at, not used."""
