"""Every shape of model that has to train to the bits of plain torch, each as small as it can be."""

from tests.exactness.case import Case
from tests.exactness.shapes import flow, gradients, layers, routing, weights

SHAPES: tuple[Case, ...] = (*gradients.CASES, *flow.CASES, *routing.CASES, *weights.CASES, *layers.CASES)
