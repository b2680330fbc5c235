"""DeepSpeed's own tests."""
