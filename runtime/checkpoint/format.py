"""The list of a checkpoint's files, written last and checked first."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import CheckpointError

FORMAT = "gpuworker checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
MAX_BYTES = 1 << 26
WEIGHTS = "weights.safetensors"
STATE = "state.pt"
_RANK = re.compile(r"ranks-(\d{5})\.pt")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def rank_file(rank: int) -> str:
    """Name of the file of one rank's state."""
    return f"ranks-{rank:05d}.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What belongs to a checkpoint.

    Attributes:
        epoch: Closed epochs.
        global_step: Batches trained by all ranks together.
        files: Size in bytes and SHA-256 of each file but the manifest.
        about: Where it comes from, for people.
    """

    epoch: int
    global_step: int
    files: dict[str, tuple[int, str]]
    about: dict[str, str]

    @property
    def world_size(self) -> int:
        """How many ranks' states it holds."""
        return sum(_RANK.fullmatch(name) is not None for name in self.files)

    def to_bytes(self) -> bytes:
        """The file's content, which carries the SHA-256 of itself."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "epoch": self.epoch,
            "global_step": self.global_step,
            "files": {n: {"bytes": b, "sha256": s} for n, (b, s) in sorted(self.files.items())},
            "about": self.about,
        }
        return _dump({**body, "sha256": hashlib.sha256(_dump(body)).hexdigest()})

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read a file's content; every byte must be as it was written.

        Raises:
            CheckpointError: It is altered, or of another version.
        """
        try:
            body = json.loads(content)
            if body["format"] != FORMAT:
                raise CheckpointError(f"its format is {body['format']!r}, not {FORMAT!r}")
            if body["version"] != VERSION:
                raise CheckpointError(
                    f"its format version is {body['version']}, this program reads {VERSION}; "
                    "resume with the version of the program that wrote it"
                )
            digest = body.pop("sha256")
            if (
                hashlib.sha256(_dump(body)).hexdigest() != digest
                or _dump({**body, "sha256": digest}) != content
            ):
                raise CheckpointError("its SHA-256 does not agree")
            files = {n: (int(f["bytes"]), str(f["sha256"])) for n, f in body["files"].items()}
            found = cls(
                epoch=int(body["epoch"]),
                global_step=int(body["global_step"]),
                files=files,
                about=dict(body["about"]),
            )
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise CheckpointError(f"not readable: {type(error).__name__}: {error}") from error
        found._check_names()
        return found

    def _check_names(self) -> None:
        """No other names, so that nothing outside the directory is read."""
        expected = {WEIGHTS, STATE, *map(rank_file, range(self.world_size))}
        if set(self.files) != expected or self.world_size == 0:
            raise CheckpointError(f"it lists {sorted(self.files)}, not {sorted(expected)}")
        for name, (size, digest) in self.files.items():
            if size < 0 or not _SHA256.fullmatch(digest):
                raise CheckpointError(f"its entry of {name} is no size and SHA-256")


def _dump(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()
