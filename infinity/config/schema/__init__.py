"""What each block of the JSON may say: models, defaults, units of numbers, older spellings.

Knows keys and values; must not know what follows from them (`infinity.config.resolve`).
"""
