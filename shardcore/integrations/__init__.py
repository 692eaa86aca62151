"""Training loops of other libraries on shardcore. Import the module of the library that you use."""
