"""The workloads of the FSDP benchmark: transformers of three sizes."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness.models import WORKLOADS as ALL
from benchmarks.harness.models import CharTransformer

WORKLOADS = {
    "small": replace(ALL["transformer"], name="small"),
    "middle": replace(
        ALL["transformer"],
        name="middle",
        what="character transformer 4x192, length 64, batch 8, AdamW fused",
        make_model=lambda: CharTransformer(width=192, depth=4),
    ),
    "wide": replace(
        ALL["transformer"],
        name="wide",
        what="character transformer 4x384, length 64, batch 8, AdamW fused",
        make_model=lambda: CharTransformer(width=384, depth=4),
    ),
}
