"""A replica of the model: construction, flat parameters, optimizer steps and averaging."""

from __future__ import annotations
