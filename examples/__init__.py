"""Programs that show shardcore at work. Run them from the repository root: ``python -m
examples.train_gpt --help``.
"""
