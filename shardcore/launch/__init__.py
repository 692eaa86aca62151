"""Starting ranks: ``shardcore run`` and ``shardcore.notebook_launcher``."""
