"""A training to look at and to copy: a small language model on your text, from its command line to its results.

Uses what everybody else uses, `import infinity`; nothing imports it but the command line.
"""
