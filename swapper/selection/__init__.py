"""From a config to the backend that moves the bytes of a volume: a self-test where one is due, and a race."""
