"""Images and videos as base64 text, as requests carry them."""

from __future__ import annotations

import base64
import importlib
import io
from pathlib import Path
from typing import Any


def encode_image_base64(image: Any) -> str:
    """Of a file's path or bytes, as they are, or of a PIL image, as PNG. Raises OSError, or TypeError for the rest."""
    if isinstance(image, str | Path):
        data = Path(image).read_bytes()
    elif isinstance(image, bytes):
        data = image
    elif callable(getattr(image, "save", None)):
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        data = buffer.getvalue()
    else:
        raise TypeError(f"an image is a path, bytes or a PIL image, not {type(image).__name__}")
    return base64.b64encode(data).decode()


def encode_video_base64(path: str, num_frames: int = 16) -> str:
    """``num_frames`` frames at equal distances as PNG files, one after the other, behind the mark ``video:``.

    Raises ImportError without OpenCV (``pip install opencv-python-headless``), OSError for what is no video.
    """
    cv2: Any = importlib.import_module("cv2")
    video = cv2.VideoCapture(path)
    frames = []
    while (read := video.read())[0]:
        frames.append(read[1])
    video.release()
    if not frames:
        raise OSError(f"Could not open video file:{path}")
    last = len(frames) - 1
    step = last / (num_frames - 1) if num_frames > 1 else 0.0
    chosen = [frames[min(last, int(i * step))] for i in range(num_frames)]
    data = b"".join(cv2.imencode(".png", frame)[1].tobytes() for frame in chosen)
    return "video:" + base64.b64encode(data).decode()
