"""Several samples of one answer. As soon as a majority is certain, the others are stopped."""

from __future__ import annotations

from common import use_backend

import bough as sgl

SAMPLES = 5


@sgl.function
def consistent(s, question):
    s += sgl.user("What is 2 + 2?") + sgl.assistant("The answer is 4")
    s += sgl.user(question) + sgl.assistant_begin() + "The answer is "
    forks = s.fork(SAMPLES)
    forks += sgl.gen("answer", type=int, max_tokens=6, temperature=0.7)
    return forks.join("majority", name="answer")


def main():
    state = consistent.run("What is 3 + 4?")
    print("answer:", state["answer"], "of samples", state.ret_value)
    return state


if __name__ == "__main__":
    use_backend()
    main()
