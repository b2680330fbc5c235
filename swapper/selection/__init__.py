"""From a config to the backend that moves the bytes of a volume: self-test and race."""
