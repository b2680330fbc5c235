"""Contents of the modules with DeepSpeed's names. ``names.toml`` lists them, `infinity.deepspeed.modules` makes them."""
