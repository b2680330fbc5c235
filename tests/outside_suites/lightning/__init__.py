"""Lightning's own tests of its DeepSpeed strategies."""
