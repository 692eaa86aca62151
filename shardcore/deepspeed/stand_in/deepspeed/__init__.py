"""shardcore under DeepSpeed's names (shardcore.deepspeed.names): `import deepspeed` after
install_as_deepspeed.
"""

import sys

from shardcore.deepspeed.as_deepspeed import register

register(sys.modules[__name__])
