"""What watches a run and may end it: early stopping, the best weights, a limit of time."""

from runtime.callbacks.base import Callback
from runtime.callbacks.best import KeepBest
from runtime.callbacks.stopping import EarlyStopping, TimeLimit

__all__ = ["Callback", "EarlyStopping", "KeepBest", "TimeLimit"]
