"""Libraries that have a training loop of their own, on the engine without DeepSpeed's name: transformers, accelerate, Lightning.

Each module imports its library, and nothing below imports them: without these libraries everything else works, as fast.
"""
