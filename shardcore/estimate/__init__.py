"""Memory and communication of a rank, from shapes alone: `predict`, and the command line's
`shardcore estimate`.
"""

from shardcore.estimate.predict import Prediction, Transfer, predict

__all__ = ["Prediction", "Transfer", "predict"]
