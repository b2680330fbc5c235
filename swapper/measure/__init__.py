"""Measurements of drives under the engine's kind of requests, and the choice of a backend by them."""
