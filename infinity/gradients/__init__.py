"""Main gradients: collected from autograd, summed, spilled, shown, and handed to the update."""
