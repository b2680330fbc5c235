"""transformers' Trainer, accelerate and Lightning on the engine, without DeepSpeed's names.

Each module imports its library. Nothing else imports these modules, so the engine works without the libraries.
"""
