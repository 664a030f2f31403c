"""A conversation. The second answer is shown while it is written."""

from __future__ import annotations

from common import use_backend

import bough as sgl


@sgl.function
def talk(s, first, second):
    s += sgl.system("You answer in one short sentence.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=24))
    with s.user():
        s += second
    with s.assistant():
        s += sgl.gen("answer_2", max_tokens=24)


def main():
    state = talk.run("What is the sun?", "And the moon?", temperature=0, stream=True)
    for piece in state.text_iter("answer_2"):
        print(piece, end="", flush=True)
    print()
    return state.messages()


if __name__ == "__main__":
    use_backend()
    main()
