"""Plain RQ without a client of Gristmill's; `gristmill-worker rq --queue topics --model …` runs the jobs.

python rq_enqueue.py "A list can be sorted in place." "Raised when a file cannot be opened."
"""

import os
import sys

from redis import Redis
from rq import Queue
from rq.results import Result
from rq.serializers import JSONSerializer

URL = os.environ.get("GRISTMILL_REDIS", "redis://localhost:6379/0")
QUEUE = os.environ.get("GRISTMILL_QUEUE", "topics")
TIMEOUT_S = int(os.environ.get("SCORE_TIMEOUT_S", "30"))


def main(texts: list[str]) -> int:
    failures = 0
    # The socket has to wait for longer than a result is waited for.
    with Redis.from_url(URL, socket_timeout=TIMEOUT_S + 5) as redis:
        queue = Queue(QUEUE, connection=redis, serializer=JSONSerializer)
        jobs = [queue.enqueue("gristmill.rq_jobs.score", text, deadline_s=TIMEOUT_S) for text in texts]
        for text, job in zip(texts, jobs, strict=True):
            result = job.latest_result(timeout=TIMEOUT_S)
            if result is not None and result.type == Result.Type.SUCCESSFUL:
                print(text, result.return_value)  # noqa: T201
            else:
                why = (
                    "no result in time" if result is None else str(result.exc_string).strip().splitlines()[-1]
                )
                print(text, "failed:", why, file=sys.stderr)  # noqa: T201
                failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
