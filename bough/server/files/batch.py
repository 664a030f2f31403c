"""What a batch is, and how its input is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from bough.base.limits import Limits

MOST_ERRORS = 100
OVER = ("completed", "failed", "expired", "cancelled")


class Counts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, kw_only=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    data: list[BatchError]
    object: str = "list"


class Life(msgspec.Struct, kw_only=True):
    """How long the files with the answers are kept, from when they are made."""

    seconds: int
    anchor: Literal["created_at"] = "created_at"


class Batch(msgspec.Struct, kw_only=True):
    """A batch as OpenAI's clients know it; times in seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: str = "batch"
    status: str = "validating"
    model: str | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None
    output_expires_after: Life | None = None


class BatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Life | None = None


class Line(msgspec.Struct, kw_only=True):
    """One line of a batch's input."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Answered(msgspec.Struct):
    """As much of a line of a batch's output as says which request it answers."""

    custom_id: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the input file a request is."""

    custom_id: str
    offset: int
    length: int


def read_places(path: Path, endpoint: str, limits: Limits) -> tuple[list[Place], list[BatchError]]:
    """Disk: the requests of an input file, and what is wrong with it. Only one line at a time is in memory."""
    places: list[Place] = []
    errors: list[BatchError] = []
    known: set[str] = set()
    decode = msgspec.json.Decoder(Line).decode
    offset = 0
    with open(path, "rb") as file:
        for number, text in enumerate(iter(lambda: file.readline(limits.body_bytes + 1), b""), 1):
            begin, offset = offset, offset + len(text)
            if not text.strip():
                continue
            error = None
            if len(text) > limits.body_bytes:
                error = BatchError(code="line_too_long", message=f"a line has more than {limits.body_bytes} bytes")
            elif len(places) == limits.batch_requests:
                error = BatchError(code="too_many_requests", message=f"more than {limits.batch_requests} requests")
            else:
                try:
                    line = decode(text)
                except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
                    error = BatchError(code="invalid_json_line", message=str(problem))
                else:
                    error = _wrong(line, endpoint, known)
            if error is not None:
                error.line = number
                errors.append(error)
                if error.code in ("line_too_long", "too_many_requests") or len(errors) == MOST_ERRORS:
                    break
                continue
            known.add(line.custom_id)
            places.append(Place(line.custom_id, begin, len(text)))
    if not places and not errors:
        errors.append(BatchError(code="empty_file", message="the input file has no requests"))
    return places, errors


def _wrong(line: Line, endpoint: str, known: set[str]) -> BatchError | None:
    if line.custom_id in known:
        return BatchError(code="duplicate_custom_id", message="custom_id is not unique", param="custom_id")
    if line.method != "POST":
        return BatchError(code="invalid_method", message="the method must be POST", param="method")
    if line.url != endpoint:
        return BatchError(code="mismatched_url", message=f"the url must be the batch's, {endpoint}", param="url")
    return None


def read_line(path: Path, place: Place) -> Line:
    """Disk: one request of an input file that was read before."""
    with open(path, "rb") as file:
        file.seek(place.offset)
        return msgspec.json.decode(file.read(place.length), type=Line)


def answered(path: Path) -> set[str]:
    """Disk: the requests that ``path`` answers; a last line that was not written whole is cut off."""
    found: set[str] = set()
    if not path.exists():
        return found
    decode = msgspec.json.Decoder(Answered).decode
    whole = 0
    with open(path, "r+b") as file:
        for text in file:
            if not text.endswith(b"\n"):
                break
            found.add(decode(text).custom_id)
            whole += len(text)
        file.truncate(whole)
    return found


def append(path: Path, text: bytes) -> None:
    """Disk: one more line."""
    with open(path, "ab") as file:
        file.write(text + b"\n")
