"""What authors of backends test them with."""

from swapper.testing.conformance import BackendConformance, ConformanceError, run_conformance

__all__ = ["BackendConformance", "ConformanceError", "run_conformance"]
