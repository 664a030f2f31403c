"""A run of the supervisor: ``supervisor_main.py MODEL PORT GRACE``; both processes are the tests' own."""

import sys
from pathlib import Path

from bough.base.config import Config, ModelConfig, ServeConfig
from bough.engine.supervisor import Supervisor

model, port, grace = sys.argv[1:]
here = Path(__file__).parent
config = Config(model=ModelConfig(path=model), serve=ServeConfig(port=int(port), grace=float(grace)))
commands = [(sys.executable, str(here / name)) for name in ("engine_main.py", "api_main.py")]
sys.exit(Supervisor(config, *commands).run())
