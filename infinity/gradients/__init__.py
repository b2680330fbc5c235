"""Main gradients: collected from autograd, summed, spilled, shown, and given to the update."""
