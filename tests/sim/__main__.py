"""``python -m tests.sim SEED [--bug NAME] [--trace] [--count N]``: replay a schedule, and shrink it if it fails."""

from __future__ import annotations

import argparse
import contextlib
import sys

from bough.base.params import SamplingParams

from .planted import BY_NAME, planted
from .replay import failure, shrink
from .script import Arrive, Event, write


def describe(event: Event) -> str:
    if not isinstance(event, Arrive):
        return repr(event)
    request, default = event.request, SamplingParams()
    asked = {k: v for k in default.__struct_fields__ if (v := getattr(request.params, k)) != getattr(default, k)}
    about = {"namespace": request.namespace, "priority": request.priority, "timeout": request.timeout}
    about |= {"constraint": request.constraint, "reasoning": request.reasoning}
    fate = {k: getattr(event, k) for k in ("seed", "quit_after", "gates", "poison_at", "fail_at")}
    return f"Arrive(step={event.step}, {request.rid}, prompt={request.prompt.tolist()}, {asked} {about} {fate})"


def replay(seed: int, trace: bool) -> bool:
    """Whether ``seed`` passes; says how it fails."""
    script = write(seed)
    found = failure(script)
    if found is None:
        if trace:
            failure(script, trace=True)
        return True
    print(f"seed {seed}, step {found.step}, at {found.where}: {found.text}")
    small = shrink(script, found.kind)
    print(f"shrunk from {len(script.events)} to {len(small.events)} events:\n  {small.settings}")
    for event in small.events:
        print(f"  {describe(event)}")
    if trace:
        failure(small, trace=True)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Replay schedules of the simulation.")
    parser.add_argument("seed", type=int, help="the first schedule")
    parser.add_argument("--count", type=int, default=1, help="how many schedules, until one fails")
    parser.add_argument("--bug", choices=sorted(BY_NAME), metavar="NAME", help="with a planted bug")
    parser.add_argument("--trace", action="store_true", help="print every event and output")
    args = parser.parse_args()
    with planted(BY_NAME[args.bug]) if args.bug else contextlib.nullcontext():
        for seed in range(args.seed, args.seed + args.count):
            if not replay(seed, args.trace):
                return 1
    print(f"{args.count} of {args.count} passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
