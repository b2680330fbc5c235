"""accelerate's own tests of what it does with DeepSpeed."""
