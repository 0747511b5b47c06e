"""``python -m runtime`` shows what there is to train on."""

from __future__ import annotations

import sys

from runtime.machine_report import machine_report

sys.stdout.write(machine_report())
