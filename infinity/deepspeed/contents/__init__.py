"""Contents of the modules with DeepSpeed's names. `infinity.deepspeed.modules` puts them into the modules."""
