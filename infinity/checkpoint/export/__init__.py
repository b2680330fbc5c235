"""The weights of a checkpoint without an engine: written as files, or given as tensors. Knows checkpoints and such files."""
