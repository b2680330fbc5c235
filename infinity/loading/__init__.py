"""Builds and loads models that are larger than memory: `Init` and `load_pretrained` put their parameters on drives."""
