"""The version of shardcore, written once. pyproject.toml and setup.py read it from here."""

__version__ = "0.1.0"
