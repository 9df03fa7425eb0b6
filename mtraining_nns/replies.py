"""Files of the workers of a launch: logs beside the checkpoints, errors in a folder of the launcher's own.

What a worker says last has to reach the launcher from a full disk, too.
"""

import os

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import LogsDest


class Logs(DefaultLogsSpecs):
    """torch's logs of all local ranks but 0, which writes to the console; errors go to `replies`."""

    def __init__(self, log_dir: str, replies: str, nproc: int):
        super().__init__(log_dir, redirects={rank: Std.ALL for rank in range(1, nproc)})
        self.replies = replies

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """torch calls it with the environment of every local rank."""
        found = super().reify(envs)
        for rank, env in envs.items():
            found.error_files[rank] = env["TORCHELASTIC_ERROR_FILE"] = os.path.join(self.replies, f"{rank}.json")
        return found
