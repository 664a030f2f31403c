"""An outline first; then all its points are written beside each other, behind one shared prefix."""

from __future__ import annotations

from common import use_backend

import bough as sgl

POINTS = 3


@sgl.function
def skeleton(s, question):
    s += sgl.user(f"{question} Give {POINTS} points of two or three words each.")
    s += sgl.assistant_begin()
    for i in range(POINTS):
        s += f"{i + 1}." + sgl.gen(f"point_{i}", max_tokens=8, stop=["\n", "."]) + "\n"
    s += sgl.assistant_end()
    forks = s.fork(POINTS)
    forks += lambda i: (
        sgl.user(f"Write one sentence on point {i + 1}.") + sgl.assistant(sgl.gen("detail", max_tokens=16))
    )
    forks.join()


def main():
    state = skeleton.run("How do I sleep better?", temperature=0)
    for i, detail in enumerate(state["detail"]):
        print(f"{i + 1}.{state[f'point_{i}']}: {detail.strip()}")
    return state


if __name__ == "__main__":
    use_backend()
    main()
