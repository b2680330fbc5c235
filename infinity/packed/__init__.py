"""Packed storage of frozen weights: formats, their kernels, and which weights of a model are packed.

A unit's flat buffer always holds plain weights in the compute dtype. Where a unit rests (drive, RAM), its packed weights take a
half or a quarter of that; they are unpacked when the unit is fetched. What the model computes with is, bit for bit,
``unpack(pack(weight.to(compute_dtype)))``.
"""
