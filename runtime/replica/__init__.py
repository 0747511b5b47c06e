"""One replica: how it is built, its flat parameters, its steps, its averagings."""

from __future__ import annotations
