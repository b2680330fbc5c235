"""Random sequences of what users do, on random small models, against plain torch."""
