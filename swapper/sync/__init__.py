"""How threads wake each other, and how Ctrl-C, signal handlers and finalizers are handled."""
