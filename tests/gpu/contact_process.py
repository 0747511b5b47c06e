"""One process of first contact: ``python -m tests.gpu.contact_process PART --out DIR``.

Runs the cases of a part that have not begun yet, and ends after the first that fails: the next
process continues behind it.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import os
import re
import sys
import time
import traceback
from pathlib import Path

from tests.gpu.contact_record import AGAIN, NotHere, Record

_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, -1


def _allow_debuggers() -> None:
    """Allow any debugger to attach, where Yama restricts it to ancestors."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANY_PROCESS), 0, 0, 0)


def run_part(options: argparse.Namespace, record: Record) -> int:
    """Run the cases that have not begun; the exit status of the process."""
    parts, part = importlib.import_module(options.parts_from), options.part
    cases = {
        name: work
        for name, work in parts.PARTS[part](
            parts.setting_of(record, options.times, options.limit)
        ).items()
        if re.search(options.cases, name)
    }
    record.plan(part, list(cases))
    if not cases:
        record.end(part, "*", "not run", note="no case matches")
    begun = record.begun(part)
    for name, work in cases.items():
        if name in begun:
            continue
        record.begin(part, name)
        begin = time.monotonic()
        try:
            figures = work()
        except NotHere as why:
            record.end(part, name, "not run", note=str(why))
        except BaseException as error:
            traceback.print_exc()
            note = f"{type(error).__name__}: {error}"
            record.end(part, name, "failed", time.monotonic() - begin, note=note[:2000])
            return AGAIN
        else:
            record.end(part, name, "passed", time.monotonic() - begin, figures=figures)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--parts-from", default="tests.gpu.contact_parts")
    parser.add_argument("--cases", default="")
    faulthandler.enable()
    _allow_debuggers()
    options = parser.parse_args()
    status = run_part(options, Record(options.out))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a hanging thread would keep the process alive


if __name__ == "__main__":
    main()
