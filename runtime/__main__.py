"""``python -m runtime`` shows what there is to train on."""

from __future__ import annotations

import sys

from runtime.summary import device_summary

sys.stdout.write(device_summary() + "\n")
