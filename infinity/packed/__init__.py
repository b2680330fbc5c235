"""Packed storage of frozen weights: formats, their kernels, and which weights of a model are packed.

A unit's flat buffer always has plain weights in the compute dtype. On drives and in RAM, packed weights take half or a
quarter of that. They are unpacked when the unit is fetched: to ``unpack(pack(weight.to(compute_dtype)))``, bit for bit.
"""
