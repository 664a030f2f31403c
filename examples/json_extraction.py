"""A typed object out of a text; a value that will not do is asked again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common import use_backend

import bough as sgl


@dataclass
class Booking:
    name: str
    guests: int
    meal: Literal["lunch", "dinner"]


def possible(booking):
    if not 0 < booking.guests < 20:
        raise ValueError("guests must be between 1 and 19")


@sgl.function
def extract(s, message):
    s += sgl.system("You turn messages into bookings, as JSON.")
    s += sgl.user("A table for three on the name of Lee, for lunch.")
    s += sgl.assistant('{"name": "Lee", "guests": 3, "meal": "lunch"}')
    s += sgl.user(message)
    s += sgl.assistant(sgl.gen("booking", type=Booking, max_tokens=40, reask=2, validate=possible))


def main():
    state = extract.run("Hello, this is Ann. Can we come for dinner? We are five.", temperature=0)
    print(state["booking"])
    return state


if __name__ == "__main__":
    use_backend()
    main()
