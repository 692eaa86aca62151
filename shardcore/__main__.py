"""python -m shardcore: the command line (shardcore/cli.py)."""

import sys

from shardcore.cli import main

sys.exit(main())
