"""An engine process with a scripted engine."""

import sys

from scripted import build

from bough.engine.process import main

sys.exit(main(build))
