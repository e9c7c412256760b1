"""`eagle3 serve wait`: from a server's start to its first request, without disturbing it.

Reads the log and asks passive endpoints only; nothing here makes a server generate a token. Imports no torch.
"""

from eagle3.serve.wait.ready import Graphs, Progress, Ready
from eagle3.serve.wait.wait import wait_until_ready

__all__ = ["Graphs", "Progress", "Ready", "wait_until_ready"]
