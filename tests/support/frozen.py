"""Imported last by the process that others are forked from: what it has imported is left out of
collections of garbage.
"""

import gc

gc.collect()
gc.freeze()
