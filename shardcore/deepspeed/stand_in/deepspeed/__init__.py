"""What `import deepspeed` finds where install_as_deepspeed was called: shardcore takes its place in sys.modules."""

from shardcore.deepspeed.as_deepspeed import register

register()
