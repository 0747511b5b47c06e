"""Evaluation of a model without training: prediction, and means over a data set."""
