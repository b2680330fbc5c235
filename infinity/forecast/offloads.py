"""Where weights and states may go: the choices that `infinity plan` compares, each as tiers of (weights, states)."""

from __future__ import annotations

ON_CPU = (("none", "none"), ("none", "nvme"), ("nvme", "nvme"))
ON_GPU = (("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("none", "nvme"), ("cpu", "nvme"), ("nvme", "nvme"))
