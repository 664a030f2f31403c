"""The engine process: ``python -m bough.engine.process``, started by the supervisor."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bough.base import log
from bough.base.config import Config
from bough.base.errors import DeviceLost
from bough.engine.launch import EXIT_FAILED, Launch
from bough.engine.openmp import wait_briefly

if TYPE_CHECKING:
    from bough.engine.driver import Core

logger = logging.getLogger("bough.engine")

SWITCH_SECONDS = 0.0005
"""So long the loop waits for Python's lock at most while a thread that reads constraints runs Python."""


def build_engine(config: Config) -> Core:
    """The real engine; imported here, because it is slow to import and the parent may die meanwhile."""
    wait_briefly()
    from bough.engine.build import build

    gc.freeze()
    return build(config)


def settle() -> None:
    """A process that has built its engine steps without long pauses from now on.

    What the start has made stays: no later collection looks through its 180,000 objects, which takes 90 ms.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    sys.setswitchinterval(SWITCH_SECONDS)


def main(build: Callable[[Config], Core] = build_engine) -> int:
    """Build an engine and serve it until SIGTERM; the exit code."""
    gc.disable()  # modules are not worth looking through while they are loaded
    launch = Launch.receive()
    log.configure("engine", launch.config.serve.log_level)
    from bough.engine.driver import Driver
    from bough.engine.ipc import SocketPort

    try:
        port = SocketPort(Path(launch.run_dir))  # clients wait there for the engine
        core = build(launch.config)
        driver = Driver(core, port)
    except Exception as error:
        return launch.failed(error)
    signal.signal(signal.SIGTERM, lambda number, frame: driver.stop())
    settle()
    launch.ready()
    try:
        driver.run()
    except DeviceLost as error:
        logger.error("%s; this process ends, to be started again", error.message, exc_info=error.__cause__)
        return EXIT_FAILED
    except Exception as error:
        logger.error("the engine failed", exc_info=error)
        return EXIT_FAILED
    finally:
        core.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
