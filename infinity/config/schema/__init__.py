"""Models of the JSON: the keys of each block, their types, defaults, units and older spellings."""
